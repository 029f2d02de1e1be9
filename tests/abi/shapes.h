// Whether two function pointer types can be called through each other: the same number of parameters, each a pointer in
// both or an integer (enums count as such) of one size in both, and so on for what pointers point to.
#pragma once
#include <cstddef>
#include <type_traits>

namespace shapes {

template <class T, class = void>
struct is_complete : std::false_type {};
template <class T>
struct is_complete<T, std::void_t<decltype(sizeof(T))>> : std::true_type {};

template <class A, class B>
constexpr bool same();

template <class A, class B>
struct same_function : std::false_type {};
template <class R, class... As, class S, class... Bs>
struct same_function<R(As...), S(Bs...)> {
  static constexpr bool arguments() {
    if constexpr (sizeof...(As) != sizeof...(Bs)) {
      return false;
    } else {
      return (same<As, Bs>() && ...);
    }
  }
  static constexpr bool value = same<R, S>() && arguments();
};

template <class A, class B>
constexpr bool same_pointee() {
  if constexpr (std::is_function_v<A> || std::is_function_v<B>) {
    return same_function<A, B>::value;
  } else if constexpr (!is_complete<A>::value || !is_complete<B>::value) {
    return true;  // void, and the driver's handles
  } else {
    return same<A, B>();
  }
}

template <class A, class B>
constexpr bool same() {
  using P = std::remove_cv_t<A>;
  using Q = std::remove_cv_t<B>;
  constexpr bool integers =
      (std::is_integral_v<P> || std::is_enum_v<P>)&&(std::is_integral_v<Q> || std::is_enum_v<Q>);
  if constexpr (std::is_void_v<P> || std::is_void_v<Q>) {
    return std::is_void_v<P> && std::is_void_v<Q>;
  } else if constexpr (std::is_pointer_v<P> && std::is_pointer_v<Q>) {
    return same_pointee<std::remove_cv_t<std::remove_pointer_t<P>>, std::remove_cv_t<std::remove_pointer_t<Q>>>();
  } else if constexpr (integers) {
    // The signedness of an enum is the compiler's choice.
    return sizeof(P) == sizeof(Q) && (std::is_enum_v<P> || std::is_enum_v<Q> || std::is_signed_v<P> == std::is_signed_v<Q>);
  } else if constexpr (std::is_class_v<P> && std::is_class_v<Q>) {
    return sizeof(P) == sizeof(Q) && alignof(P) == alignof(Q);
  } else {
    return false;
  }
}

}  // namespace shapes
