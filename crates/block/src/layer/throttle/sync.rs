//! The locks and flags that threads meet at, by the names that `waiter`, `arbiter` and `seat` use.
//!
//! These three files name nothing of `std::sync` themselves: the model check (`tests/model`) compiles the very same files with a checker's
//! types under these names, and runs them through every interleaving.

pub(super) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, Ordering},
};
