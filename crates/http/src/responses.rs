//! Responses: a JSON object, or an error in the same form.

use axum::{
    body::{Bytes, to_bytes},
    http::{
        HeaderValue, StatusCode,
        header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER},
    },
    response::{IntoResponse, Response},
};
use serde::Serialize;

use super::{main_thread::NoAnswer, stream::json};

/// Body of an error response.
#[derive(Serialize)]
struct ErrorAnswer {
    error: String,
}

/// Maximum length of an error message in bytes.
const MAX_REASON_BYTES: usize = 4096;

/// JSON response that must not be cached.
pub(super) fn json_response(value: &impl Serialize) -> Response {
    serialized_response(json(value))
}

/// JSON response of serialized text.
pub(super) fn serialized_response(json: Bytes) -> Response {
    ([(CONTENT_TYPE, "application/json"), (CACHE_CONTROL, "no-store")], json).into_response()
}

/// Error response, in the daemon's form of messages.
pub(super) fn error_response(status: StatusCode, why: &str) -> Response {
    (status, json_response(&ErrorAnswer { error: format!("weir: {why}") })).into_response()
}

/// Response if the main thread does not answer in time.
pub(super) fn unavailable_response(why: NoAnswer) -> Response {
    let retry_after = [(RETRY_AFTER, "5")];
    (retry_after, error_response(StatusCode::SERVICE_UNAVAILABLE, why)).into_response()
}

/// Converts the framework's plain-text rejections, such as of a name that is not UTF-8, to JSON.
pub(super) async fn unify_errors(response: Response) -> Response {
    let is_text = |kind: &HeaderValue| kind.as_bytes().starts_with(b"text/plain");
    // Only the framework answers in plain text.
    if !response.status().is_client_error() || !response.headers().get(CONTENT_TYPE).is_some_and(is_text) {
        return response;
    }
    let (head, body) = response.into_parts();
    let why = to_bytes(body, MAX_REASON_BYTES).await.unwrap_or_default();
    error_response(head.status, &String::from_utf8_lossy(&why))
}
