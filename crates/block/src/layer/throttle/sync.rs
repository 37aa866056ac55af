//! The locks and flags that threads share, under the names that `waiter`, `tree` and `slot` use.
//!
//! These three files do not name `std::sync` themselves. The model check (`tests/model`) compiles
//! the same files with a checker's types under these names, and runs them through every
//! interleaving.

pub(super) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, Ordering},
};
