#[cfg(any(test, fuzzing))] use super::*;
