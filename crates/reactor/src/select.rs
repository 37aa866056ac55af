//! Waits for the first of two futures, on any executor.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    task::Poll,
};

/// Result of the future that completed first.
#[derive(Debug)]
pub enum FirstReady<A, B> {
    /// Output of the first argument.
    One(A),
    /// Output of the second argument.
    Other(B),
}

impl<T> FirstReady<T, T> {
    /// Output of the future that completed first.
    pub fn into_output(self) -> T {
        match self {
            Self::One(output) | Self::Other(output) => output,
        }
    }
}

/// Waits for either future and drops the rest. If both are ready, `one` wins.
pub async fn first<A, B>(one: impl Future<Output = A>, other: impl Future<Output = B>) -> FirstReady<A, B> {
    let (mut one, mut other) = (pin!(one), pin!(other));
    poll_fn(|context| {
        if let Poll::Ready(output) = one.as_mut().poll(context) {
            return Poll::Ready(FirstReady::One(output));
        }
        other.as_mut().poll(context).map(FirstReady::Other)
    })
    .await
}
