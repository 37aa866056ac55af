//! How it is said over HTTP: a JSON object, or why there is none.

use axum::{
    body::{Bytes, to_bytes},
    http::{
        HeaderValue, StatusCode,
        header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER},
    },
    response::{IntoResponse, Response},
};
use serde::Serialize;

use super::{desk::Silent, stream::json};

/// Why there is no other answer.
#[derive(Serialize)]
struct ErrorAnswer {
    error: String,
}

/// Bytes of a sentence.
const MOST_REASON: usize = 4096;

/// A JSON object that nobody keeps.
pub(super) fn answer(value: &impl Serialize) -> Response {
    written(json(value))
}

/// The same, of its text.
pub(super) fn written(json: Bytes) -> Response {
    ([(CONTENT_TYPE, "application/json"), (CACHE_CONTROL, "no-store")], json).into_response()
}

/// Why there is no other answer, as the daemon says it elsewhere.
pub(super) fn failure(status: StatusCode, why: &str) -> Response {
    (status, answer(&ErrorAnswer { error: format!("weir: {why}") })).into_response()
}

/// The main thread does not answer.
pub(super) fn silent(why: Silent) -> Response {
    let again = [(RETRY_AFTER, "5")];
    (again, failure(StatusCode::SERVICE_UNAVAILABLE, why)).into_response()
}

/// What was refused before anybody here saw it, such as a name that is no UTF-8, in the same form.
pub(super) async fn in_one_form(answer: Response) -> Response {
    let is_text = |kind: &HeaderValue| kind.as_bytes().starts_with(b"text/plain");
    if !answer.status().is_client_error() || !answer.headers().get(CONTENT_TYPE).is_some_and(is_text) {
        return answer;
    }
    let (head, body) = answer.into_parts();
    let why = to_bytes(body, MOST_REASON).await.unwrap_or_default();
    failure(head.status, &String::from_utf8_lossy(&why))
}
