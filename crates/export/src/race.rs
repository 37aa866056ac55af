//! Waiting for whichever of two comes first.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    task::Poll,
};

/// What came first.
pub(crate) enum First<A, B> {
    One(A),
    Other(B),
}

/// Waits for either; the other is dropped. Where both are ready, the first has it.
pub(crate) async fn first<A, B>(one: impl Future<Output = A>, other: impl Future<Output = B>) -> First<A, B> {
    let (mut one, mut other) = (pin!(one), pin!(other));
    poll_fn(|context| {
        if let Poll::Ready(one) = one.as_mut().poll(context) {
            return Poll::Ready(First::One(one));
        }
        other.as_mut().poll(context).map(First::Other)
    })
    .await
}
