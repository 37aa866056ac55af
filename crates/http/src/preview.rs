//! Replays the last minutes under other limits before they are set.
//!
//! ```text
//!   body ─► main thread: settings after the change, by the rules of a change (preview_input.rs)
//!        ─► a thread of lowest priority: recording of the last minutes ─► simulator::preview
//! ```
//!
//! One at a time: a newer request cancels the running one. Never changes a setting.

use std::{sync::Arc, time::Duration};

use api::{Preview, PreviewFigures, PreviewOfOthers};
use axum::{
    Extension,
    body::Body,
    extract::{Path, State},
    http::StatusCode,
    response::Response,
};
use simulator::limit_preview::PreviewResult;
use tokio::time::timeout;

use super::{
    main_thread::{ChangeError, ObjectKind},
    page_state::PageState,
    peer::HttpPeer,
    preview_thread::PreviewOutcome,
    responses::{error_response, json_response, unavailable_response},
    sample::rounded,
    settings_body,
};

/// Time that a client waits for the result.
const PREVIEW_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) async fn preview(
    State(site): State<Arc<PageState>>,
    kind: ObjectKind,
    Extension(peer): Extension<HttpPeer>,
    Path(name): Path<String>,
    body: Body,
) -> Response {
    let request = match settings_body::read(kind, name, peer, body).await {
        Ok(request) => request,
        Err(refused) => return refused,
    };
    let then = match site.main_thread.preview_input(request).await {
        Err(why) => return unavailable_response(why),
        Ok(Err(ChangeError::Unknown(why))) => return error_response(StatusCode::NOT_FOUND, &why),
        Ok(Err(ChangeError::Rejected(why))) => return error_response(StatusCode::UNPROCESSABLE_ENTITY, &why),
        Ok(Ok(then)) => then,
    };
    let mut handle = match site.previews.begin(then) {
        Ok(handle) => handle,
        Err(error) => return error_response(StatusCode::SERVICE_UNAVAILABLE, &format!("{error:#}")),
    };
    let PreviewOutcome { past: interval, replayed, recorded: was, simulated: would, others } =
        match timeout(PREVIEW_TIMEOUT, handle.result()).await {
            Err(_) => {
                return unavailable_response(
                    "the preview takes too long (try again when the host is less busy)",
                );
            }
            Ok(Some(Ok(outcome))) => outcome,
            Ok(Some(Err(error))) => {
                return error_response(StatusCode::UNPROCESSABLE_ENTITY, &format!("{error:#}"));
            }
            Ok(None) => return error_response(StatusCode::CONFLICT, "another preview has replaced this one"),
        };
    json_response(&Preview {
        seconds: rounded(interval.as_secs_f64()),
        simulated_seconds: rounded(replayed.as_secs_f64()),
        requests: was.requests(),
        now: figures(&was),
        then: figures(&would),
        others: others.map(|[was, would]| PreviewOfOthers { now: figures(&was), then: figures(&would) }),
    })
}

/// Figures of a result; `None` without requests.
fn figures(result: &PreviewResult) -> Option<PreviewFigures> {
    (result.requests() > 0).then(|| PreviewFigures {
        iops: rounded(result.operations_per_second()),
        bps: rounded(result.bytes_per_second()),
        latency_p50_ns: Some(result.latency_ns(0.5)),
        latency_p99_ns: Some(result.latency_ns(0.99)),
        wait_p50_ns: Some(result.wait_ns(0.5)),
        wait_p99_ns: Some(result.wait_ns(0.99)),
        waiting_ratio: rounded(result.waiting_ratio()),
    })
}
