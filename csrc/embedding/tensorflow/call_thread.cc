#include "embedding/tensorflow/call_thread.h"

#include <thread>
#include <utility>

namespace lightcc::tf {

void CallThread::post(std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  if (!std::exchange(started_, true)) std::thread([this] { run(); }).detach();
  posted_.notify_one();
}

void CallThread::run() {
  while (true) {
    std::unique_lock lock(mutex_);
    posted_.wait(lock, [this] { return !tasks_.empty(); });
    const std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
  }
}

void CallThread::drop(lightcc_embedding_call* call) {
  const std::lock_guard lock(mutex_);
  dropped_.push_back(call);
}

void CallThread::release_dropped() {
  std::vector<lightcc_embedding_call*> dropped;
  {
    const std::lock_guard lock(mutex_);
    dropped.swap(dropped_);
  }
  for (lightcc_embedding_call* call : dropped) lightcc_embedding_release(call);
}

int CallThread::finish(lightcc_embedding_call* call, std::string* text) {
  constexpr int kAtATimeMs = 1000;
  ++calls_;
  int status;
  while ((status = lightcc_embedding_finish(call, kAtATimeMs)) == LIGHTCC_PENDING) {}
  if (status != LIGHTCC_OK) *text = lightcc_embedding_error();
  return status;
}

CallThread& call_thread() {
  static auto* thread = new CallThread;  // never destroyed: the thread runs until the process ends
  return *thread;
}

}  // namespace lightcc::tf
