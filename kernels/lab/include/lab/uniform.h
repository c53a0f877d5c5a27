// uniform<T>: a value that the text promises to be the same in all lanes. The lab takes the promise on trust.
#pragma once

namespace metal {

template <class T>
using uniform = T;

template <class T>
constexpr T make_uniform(T value) {
    return value;
}

}  // namespace metal
