//! How it is said over HTTP: a JSON object, or why there is none.

use axum::{
    http::{
        StatusCode,
        header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER},
    },
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::desk::Silent;

/// A JSON object that nobody keeps.
pub(super) fn answer(value: &Value) -> Response {
    ([(CONTENT_TYPE, "application/json"), (CACHE_CONTROL, "no-store")], value.to_string()).into_response()
}

/// Why there is no other answer, as the daemon says it elsewhere.
pub(super) fn failure(status: StatusCode, why: &str) -> Response {
    (status, answer(&json!({ "error": format!("weir: {why}") }))).into_response()
}

/// The main thread does not answer.
pub(super) fn silent(why: Silent) -> Response {
    let again = [(RETRY_AFTER, "5")];
    (again, failure(StatusCode::SERVICE_UNAVAILABLE, why)).into_response()
}
