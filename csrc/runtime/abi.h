// The structures that kernels take. The code generator owns the file, as it puts the text in front of every source.
#pragma once
#include "../../eqaccel/codegen/preludes/abi.h"
