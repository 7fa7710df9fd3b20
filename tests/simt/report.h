/* Errors of a launch. */
#pragma once

#include <signal.h>

#include <string>

namespace simt {

std::string failure_report();

/* While it lives, a fault of the memory system in a fiber ends the launch, not the process. */
class FaultGuard {
public:
    FaultGuard();
    ~FaultGuard();

private:
    stack_t previous_stack_;
};

}  // namespace simt
