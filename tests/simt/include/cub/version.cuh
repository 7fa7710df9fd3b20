/* That of the interface which is emulated. */
#pragma once

#define CUB_VERSION 300000
