// Errors as values: every entry point returns a Status and throws nothing.
#pragma once

#include <string>
#include <utility>

namespace flash_kda {

// What kind of thing went wrong. In Python they become, in this order, ValueError, TypeError,
// NotImplementedError and RuntimeError. The numbers are part of the C ABI.
enum class StatusCode : int {
  kOk = 0,
  kInvalidValue = 1,  // an argument's shape, stride, device or value is not legal
  kInvalidType = 2,   // an argument's dtype is not legal
  kUnsupported = 3,   // legal, but no implementation here can run it
  kRuntime = 4,       // the device or the system failed
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status invalid_value(std::string message) {
    return {StatusCode::kInvalidValue, std::move(message)};
  }
  static Status invalid_type(std::string message) {
    return {StatusCode::kInvalidType, std::move(message)};
  }
  static Status unsupported(std::string message) {
    return {StatusCode::kUnsupported, std::move(message)};
  }
  static Status runtime(std::string message) { return {StatusCode::kRuntime, std::move(message)}; }

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  // Names the argument, what was expected and what was given. Empty when ok.
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

}  // namespace flash_kda

// Hands a failed Status on to the caller.
#define FLASH_KDA_RETURN_IF_ERROR(expression)   \
  do {                                          \
    ::flash_kda::Status status_ = (expression); \
    if (!status_.ok()) return status_;          \
  } while (false)
