//! Changes of limits by clients with a token, as a command of the control socket: all or nothing.
//! Never decides a rule itself.

use std::{rc::Rc, sync::Arc, time::Duration};

use axum::{
    Extension,
    body::Body,
    extract::{Path, State},
    http::StatusCode,
    response::Response,
};
use cluster::actor::ChangeOrigin;
use control::{qmp, registry::Registry};
use serde_json::Value;

use super::{
    main_thread::{ChangeError, ObjectKind, SettingsRequest},
    objects::ActivityObjects,
    page_state::PageState,
    peer::HttpPeer,
    responses::{error_response, json_response, unavailable_response},
    settings_body,
};

pub(super) async fn change(
    State(site): State<Arc<PageState>>,
    kind: ObjectKind,
    Extension(peer): Extension<HttpPeer>,
    Path(name): Path<String>,
    body: Body,
) -> Response {
    let request = match settings_body::read(kind, name.clone(), peer, body).await {
        Ok(request) => request,
        Err(refused) => return refused,
    };
    match site.main_thread.change(request).await {
        Err(why) => return unavailable_response(why),
        Ok(Err(ChangeError::Unknown(why))) => return error_response(StatusCode::NOT_FOUND, &why),
        Ok(Err(ChangeError::Rejected(why))) => return error_response(StatusCode::UNPROCESSABLE_ENTITY, &why),
        Ok(Ok(())) => {}
    }
    // Collected anew, so that the response shows the change.
    match site.watch.refresh(Duration::ZERO).await {
        Ok(state) => match find(&state.objects, kind, &name) {
            Some(object) => json_response(&object),
            // Removed since the change.
            None => error_response(StatusCode::NOT_FOUND, &unknown_object(kind, &name)),
        },
        Err(why) => unavailable_response(why),
    }
}

fn find(objects: &ActivityObjects, kind: ObjectKind, name: &str) -> Option<Value> {
    let all = match kind {
        ObjectKind::Disk => &objects.disks,
        ObjectKind::Group => &objects.groups,
    };
    all.get(name).cloned().map(Value::Object)
}

pub(super) fn unknown_object(kind: ObjectKind, name: &str) -> String {
    let noun = match kind {
        ObjectKind::Disk => "disk",
        ObjectKind::Group => "group",
    };
    format!("{noun} {name}: does not exist (`weir status` lists them)")
}

/// Performs a change on the main thread, as a command of the control socket.
///
/// # Errors
/// Returns the command's error; nothing has changed then.
pub(super) async fn apply(registry: &Rc<Registry>, request: SettingsRequest) -> Result<(), ChangeError> {
    let SettingsRequest { kind: of, name, mut settings, client: who } = request;
    // An empty change checks the name and, before, the token.
    let lookup = match of {
        ObjectKind::Disk => registry.disks.get(&name).map(drop),
        ObjectKind::Group => registry.groups.get(&name).map(drop),
    };
    // Separate from the command's errors, for the status code.
    lookup.map_err(|refused| ChangeError::Unknown(refused.to_string()))?;
    if settings.is_empty() {
        return Ok(());
    }
    let changes = Value::Object(settings.clone()).to_string();
    settings.insert("name".to_owned(), name.clone().into());
    let by = ChangeOrigin::Http { client: who.clone() };
    // Attributes the event of this change to the HTTP client.
    let result = by.attribute(qmp::execute_json(registry, "x-weir-set", settings)).await;
    match &result {
        Ok(()) => tracing::info!(name, %changes, by = %who, "changed over HTTP"),
        Err(error) => {
            tracing::info!(name, %changes, by = %who, %error, "a change over HTTP was rejected");
        }
    }
    result.map_err(ChangeError::Rejected)
}
