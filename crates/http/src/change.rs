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
use cluster::actor::Actor;
use control::{qmp, registry::Registry};
use serde_json::{Value, json};

use super::{
    answers::{answer, failure, silent},
    body,
    desk::{Of, Refused, Wanted},
    objects::Objects,
    peer::Peer,
    site::Site,
};

pub(super) async fn change(
    State(site): State<Arc<Site>>,
    of: Of,
    Extension(peer): Extension<Peer>,
    Path(name): Path<String>,
    body: Body,
) -> Response {
    let wanted = match body::read(of, name.clone(), peer, body).await {
        Ok(wanted) => wanted,
        Err(refused) => return refused,
    };
    match site.desk.change(wanted).await {
        Err(why) => return silent(why),
        Ok(Err(Refused::Unknown(why))) => return failure(StatusCode::NOT_FOUND, &why),
        Ok(Err(Refused::Rule(why))) => return failure(StatusCode::UNPROCESSABLE_ENTITY, &why),
        Ok(Ok(())) => {}
    }
    // Collected anew, so that the response shows the change.
    match site.watch.look(Duration::ZERO).await {
        Ok(state) => match find(&state.objects, of, &name) {
            Some(object) => answer(&object),
            // Removed since the change.
            None => failure(StatusCode::NOT_FOUND, &unknown(of, &name)),
        },
        Err(why) => silent(why),
    }
}

fn find(objects: &Objects, of: Of, name: &str) -> Option<Value> {
    let all = match of {
        Of::Disk => &objects.disks,
        Of::Group => &objects.groups,
    };
    all.get(name).cloned().map(Value::Object)
}

pub(super) fn unknown(of: Of, name: &str) -> String {
    let of = match of {
        Of::Disk => "disk",
        Of::Group => "group",
    };
    format!("{of} {name}: does not exist (`weir status` lists them)")
}

/// Performs a change on the main thread, as a command of the control socket.
///
/// # Errors
/// Returns the command's error; nothing has changed then.
pub(super) async fn carry_out(registry: &Rc<Registry>, wanted: Wanted) -> Result<(), Refused> {
    let Wanted { of, name, mut settings, who } = wanted;
    // An empty change checks the name and, before, the token.
    let there = match of {
        Of::Disk => registry.disks.get(&name).map(drop),
        Of::Group => registry.groups.get(&name).map(drop),
    };
    // Separate from the command's errors, for the status code.
    there.map_err(|refused| Refused::Unknown(refused.to_string()))?;
    if settings.is_empty() {
        return Ok(());
    }
    let said = Value::Object(settings.clone()).to_string();
    settings.insert("name".to_owned(), json!(name));
    let by = Actor::Http { client: who.clone() };
    // `by.run` attributes the event of this change to the HTTP client.
    let done = by.run(qmp::perform_sent(registry, "x-weir-set", settings)).await;
    match &done {
        Ok(()) => tracing::info!(name, %said, by = %who, "changed over HTTP"),
        Err(error) => tracing::info!(name, %said, by = %who, %error, "not changed over HTTP"),
    }
    done.map_err(Refused::Rule)
}
