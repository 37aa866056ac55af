//! Routes of `--http`: the page, and its data as JSON.
//!
//! `docs/reference/openapi.json` describes the responses; a test compares it with the routes. Names
//! are path segments, so a slash in a name is written as `%2F`.

use std::sync::Arc;

use axum::{
    Extension, Router,
    body::Body,
    extract::{Path, State},
    http::{
        StatusCode, Uri,
        header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER},
    },
    middleware,
    response::{IntoResponse, Response},
    routing::{get, patch, post},
};

use super::{
    access::{self, AccessGuard},
    activity::MAX_INTERVAL,
    assets, change,
    connections::ConnectionHandle,
    history::HistorySpan,
    main_thread::ObjectKind,
    page_state::PageState,
    peer::HttpPeer,
    preview,
    responses::{error_response, json_response, serialized_response, unavailable_response, unify_errors},
    stream::{MAX_STREAMS_PER_PEER, StreamRejection},
};

pub(super) fn router(site: Arc<PageState>, guard: Arc<AccessGuard>) -> Router {
    let changes = Router::new()
        .route(
            "/api/v1/disks/{name}/limits",
            patch(async |page, peer, of, body| change::change(page, ObjectKind::Disk, peer, of, body).await),
        )
        .route(
            "/api/v1/groups/{name}/limits",
            patch(async |page, peer, of, body| change::change(page, ObjectKind::Group, peer, of, body).await),
        )
        .route(
            "/api/v1/disks/{name}/preview",
            post(async |page, peer, of, body| preview::preview(page, ObjectKind::Disk, peer, of, body).await),
        )
        .route(
            "/api/v1/groups/{name}/preview",
            post(async |page, peer, of, body| {
                preview::preview(page, ObjectKind::Group, peer, of, body).await
            }),
        )
        // Only the routes above: those below are readable without a token.
        .route_layer(middleware::from_fn_with_state(Arc::clone(&guard), access::check_token));
    changes
        .route("/", get(assets::index))
        .route("/assets/{name}", get(assets::asset))
        .route("/api/v1/overview", get(overview))
        .route("/api/v1/jobs", get(jobs))
        .route("/api/v1/stream", get(stream))
        .route("/api/v1/events", get(events))
        .route("/api/v1/openapi.json", get(openapi))
        .route(
            "/api/v1/disks/{name}/history",
            get(async |page, of, uri| history(page, ObjectKind::Disk, of, uri).await),
        )
        .route(
            "/api/v1/groups/{name}/history",
            get(async |page, of, uri| history(page, ObjectKind::Group, of, uri).await),
        )
        .fallback(async || {
            error_response(StatusCode::NOT_FOUND, "there is no such path (see /api/v1/openapi.json)")
        })
        .method_not_allowed_fallback(async || {
            error_response(StatusCode::METHOD_NOT_ALLOWED, "this method is not supported")
        })
        .layer(middleware::map_response(unify_errors))
        .layer(middleware::from_fn_with_state(guard, access::check))
        .with_state(site)
}

/// Description of the routes, for client generators.
const OPENAPI: &str = include_str!("../../../docs/reference/openapi.json");

async fn openapi() -> Response {
    ([(CONTENT_TYPE, "application/json"), (CACHE_CONTROL, "no-cache")], OPENAPI).into_response()
}

/// Recent events.
async fn events(State(site): State<Arc<PageState>>, uri: Uri) -> Response {
    match query_value(&uri, "since").map_or(Ok(0), str::parse) {
        Ok(id) => {
            json_response(&site.events.since(id).iter().map(|event| event.to_json()).collect::<Vec<_>>())
        }
        Err(_) => error_response(StatusCode::BAD_REQUEST, "since: is not the number of an event"),
    }
}

async fn overview(State(site): State<Arc<PageState>>) -> Response {
    match site.watch.overview_json().await {
        Ok(body) => serialized_response(body),
        Err(why) => unavailable_response(why),
    }
}

async fn jobs(State(site): State<Arc<PageState>>) -> Response {
    match site.watch.refresh_by_load().await {
        Ok(state) => json_response(&state.objects.jobs.values().collect::<Vec<_>>()),
        Err(why) => unavailable_response(why),
    }
}

async fn stream(
    State(site): State<Arc<PageState>>,
    Extension(peer): Extension<HttpPeer>,
    Extension(connection): Extension<ConnectionHandle>,
) -> Response {
    match site.watch.listen(peer).await {
        Ok(Ok(streamed)) => {
            // From now on the connection is not closed in favour of a new one.
            connection.mark_stream();
            let kind = [(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-store")];
            (kind, Body::new(streamed)).into_response()
        }
        Ok(Err(StreamRejection::TooManyListeners)) => {
            unavailable_response("too many pages are open (close some)")
        }
        Ok(Err(StreamRejection::TooManyOfPeer)) => {
            let from = match peer {
                HttpPeer::Address(_) => "your address",
                HttpPeer::User(_) => "your user",
            };
            let why = format!(
                "{MAX_STREAMS_PER_PEER} pages are open from {from}, and no more are allowed (close some)"
            );
            ([(RETRY_AFTER, "5")], error_response(StatusCode::TOO_MANY_REQUESTS, &why)).into_response()
        }
        Err(why) => unavailable_response(why),
    }
}

async fn history(
    State(site): State<Arc<PageState>>,
    kind: ObjectKind,
    Path(name): Path<String>,
    uri: Uri,
) -> Response {
    let requested = query_value(&uri, "span");
    let span = match requested {
        None => Some(HistorySpan::TenMinutes),
        Some(requested) => {
            HistorySpan::ALL.into_iter().find(|(known, _)| *known == requested).map(|(_, span)| span)
        }
    };
    let Some(span) = span else {
        return error_response(StatusCode::BAD_REQUEST, "span: is not 10m, 2h or 2d");
    };
    let Ok(since_ms) = query_value(&uri, "since").map_or(Ok(0), str::parse::<u64>) else {
        return error_response(StatusCode::BAD_REQUEST, "since: is not a time in milliseconds since 1970");
    };
    match site.watch.refresh(MAX_INTERVAL).await {
        Ok(state) => {
            let histories = match kind {
                ObjectKind::Disk => &state.disks,
                ObjectKind::Group => &state.groups,
            };
            match histories.get(&*name) {
                Some(history) => json_response(&history.report(span, since_ms, state.clock_step_s)),
                None => error_response(StatusCode::NOT_FOUND, &change::unknown_object(kind, &name)),
            }
        }
        Err(why) => unavailable_response(why),
    }
}

/// Value of a key in the query, undecoded: no value here needs an encoding.
fn query_value<'a>(uri: &'a Uri, key: &str) -> Option<&'a str> {
    let pairs = uri.query()?.split('&').filter_map(|pair| pair.split_once('='));
    pairs.filter(|(known, _)| *known == key).map(|(_, value)| value).next()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;

    #[test]
    fn openapi_lists_exactly_the_routes() {
        let described: Value = serde_json::from_str(OPENAPI).unwrap();
        let methods = ["get", "patch", "post"];
        let described: BTreeSet<_> = described["paths"]
            .as_object()
            .unwrap()
            .iter()
            .flat_map(|(path, item)| {
                let known = methods.into_iter().filter(|method| item.get(*method).is_some());
                known.map(|method| (path.clone(), method))
            })
            .collect();
        // Read from the source, because a router does not list its routes.
        let source = include_str!("api.rs");
        let routes = source.split("#[cfg(test)]").next().unwrap().split(".route(").skip(1);
        let routes: BTreeSet<_> = routes
            .filter_map(|route| {
                let path = route.split('"').nth(1)?;
                let method = methods.into_iter().find(|method| route.contains(&format!("{method}(")))?;
                path.starts_with("/api/").then(|| (path.to_owned(), method))
            })
            .collect();
        assert!(routes.len() > 8, "{routes:?}");
        assert_eq!(described, routes);
    }

    #[test]
    fn queries_are_read_as_they_are_written() {
        let uri = Uri::from_static("/x?a=1&span=2h&b&span=2d");
        assert_eq!(
            (query_value(&uri, "span"), query_value(&uri, "b"), query_value(&uri, "c")),
            (Some("2h"), None, None)
        );
    }
}
