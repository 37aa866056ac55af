//! Waiting for the first of two futures.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    task::Poll,
};

/// Result of the future that completed first.
pub(crate) enum FirstReady<A, B> {
    One(A),
    Other(B),
}

/// Waits for either future and drops the rest. If both are ready, `one` wins.
pub(crate) async fn first<A, B>(
    one: impl Future<Output = A>,
    other: impl Future<Output = B>,
) -> FirstReady<A, B> {
    let (mut one, mut other) = (pin!(one), pin!(other));
    poll_fn(|context| {
        if let Poll::Ready(output) = one.as_mut().poll(context) {
            return Poll::Ready(FirstReady::One(output));
        }
        other.as_mut().poll(context).map(FirstReady::Other)
    })
    .await
}
