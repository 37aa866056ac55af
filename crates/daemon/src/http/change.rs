//! Limits that somebody with a token wants changed: from the body of a request to the command of
//! the control socket that does it, all or nothing.
//!
//! What may be said is what `weir throttle` may: limits, weight, reservations and the watermark, by
//! their own names. A number may be a text with a unit, such as `"10M"`. Never decides a rule.

use std::{rc::Rc, sync::Arc, time::Duration};

use axum::{
    Extension,
    body::{Body, to_bytes},
    extract::{Path, State},
    http::StatusCode,
    response::Response,
};
use policy::throttle::Setting;
use serde_json::{Map, Value, json};
use settings::suggest;
use tokio::time::timeout;

use super::{
    answers::{answer, failure, silent},
    desk::{Of, Refused, Wanted},
    objects::Objects,
    server::Peer,
    site::Site,
};
use crate::{
    control::{inventory::Inventory, qmp},
    events::actor::Actor,
};

/// Of a body, in bytes: every setting there is takes less than one KiB.
const MOST_BODY: usize = 16 << 10;
/// How long a client may take to send it.
const PATIENCE: Duration = Duration::from_secs(10);
/// Beside the limits'.
const OTHERS: [&str; 4] = ["weight", "iops-reservation", "bps-reservation", "watermark"];

pub(super) async fn disk(
    State(site): State<Arc<Site>>,
    Extension(peer): Extension<Peer>,
    Path(name): Path<String>,
    body: Body,
) -> Response {
    change(&site, Of::Disk, name, peer, body).await
}

pub(super) async fn group(
    State(site): State<Arc<Site>>,
    Extension(peer): Extension<Peer>,
    Path(name): Path<String>,
    body: Body,
) -> Response {
    change(&site, Of::Group, name, peer, body).await
}

async fn change(site: &Site, of: Of, name: String, peer: Peer, body: Body) -> Response {
    let settings = match read(body).await {
        Ok(settings) => settings,
        Err((status, why)) => return failure(status, &why),
    };
    let who = peer.to_string();
    let wanted = Wanted { of, name: name.clone(), settings, who };
    match site.desk.change(wanted).await {
        Err(why) => return silent(why),
        Ok(Err(Refused::Unknown(why))) => return failure(StatusCode::NOT_FOUND, &why),
        Ok(Err(Refused::Rule(why))) => return failure(StatusCode::UNPROCESSABLE_ENTITY, &why),
        Ok(Ok(())) => {}
    }
    match site.watch.look(Duration::ZERO).await {
        Ok(state) => match find(&state.objects, of, &name) {
            Some(object) => answer(&object),
            // It has gone since.
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
    format!("{of} {name}: there is none of this name (`weir status` lists them)")
}

/// What a body wants set, in numbers.
///
/// # Errors
/// With the status that says what kind of mistake it is.
pub(super) async fn read(body: Body) -> Result<Map<String, Value>, (StatusCode, String)> {
    let whole = timeout(PATIENCE, to_bytes(body, MOST_BODY)).await;
    let whole =
        whole.map_err(|_| (StatusCode::REQUEST_TIMEOUT, "the body did not come in time".to_owned()))?;
    let whole = whole.map_err(|_| {
        (StatusCode::PAYLOAD_TOO_LARGE, format!("the body is cut off, or longer than {MOST_BODY} bytes"))
    })?;
    parse(&whole).map_err(|why| (StatusCode::UNPROCESSABLE_ENTITY, why))
}

fn parse(body: &[u8]) -> Result<Map<String, Value>, String> {
    let value = serde_json::from_slice(body)
        .map_err(|error| format!("the body is no JSON: {error} (send {{\"iops-total\": 2000}})"))?;
    let Value::Object(members) = value else {
        return Err("the body is no JSON object (send {\"iops-total\": 2000})".to_owned());
    };
    let known = || Setting::ALL.into_iter().map(Setting::name).chain(OTHERS);
    let number = |(key, value): (String, Value)| {
        if !known().any(|name| name == key) {
            let near = suggest::nearest(&key, known());
            let near = near.map(|near| format!(" (did you mean {near}?)")).unwrap_or_default();
            return Err(format!("{key:?}: nothing of this name can be set here{near}"));
        }
        let value = match value {
            Value::String(text) => {
                json!(settings::size(&text).map_err(|rule| format!("{key}={text} {rule}"))?)
            }
            other => other,
        };
        Ok((key, value))
    };
    members.into_iter().map(number).collect()
}

/// On the main thread: as if the control socket had been told to.
///
/// # Errors
/// The command's; nothing has changed then.
pub(super) async fn carry_out(inventory: &Rc<Inventory>, wanted: Wanted) -> Result<(), Refused> {
    let Wanted { of, name, mut settings, who } = wanted;
    // Whether there is one, and the token is right, may be asked without a change.
    let there = match of {
        Of::Disk => inventory.disk(&name).map(drop),
        Of::Group => inventory.group(&name).map(drop),
    };
    there.map_err(|refused| Refused::Unknown(refused.to_string()))?;
    if settings.is_empty() {
        return Ok(());
    }
    let said = Value::Object(settings.clone()).to_string();
    settings.insert("name".to_owned(), json!(name));
    let by = Actor::Http { client: who.clone() };
    let done = by.run(qmp::perform_sent(inventory, "x-weir-set", settings)).await;
    match &done {
        Ok(()) => tracing::info!(name, %said, by = %who, "changed over HTTP"),
        Err(error) => tracing::info!(name, %said, by = %who, %error, "not changed over HTTP"),
    }
    done.map_err(Refused::Rule)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_may_have_units() {
        let read = parse(br#"{"bps-total": "10M", "iops-total": 2000, "weight": 300}"#).unwrap();
        assert_eq!(Value::Object(read), json!({"bps-total": 10 << 20, "iops-total": 2000, "weight": 300}));
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (body, why) in [
            ("", "no JSON: EOF"),
            ("[1]", "no JSON object"),
            (
                r#"{"iops-totl": 1}"#,
                "\"iops-totl\": nothing of this name can be set here (did you mean iops-total?)",
            ),
            (r#"{"l2-cache-size": 1}"#, "\"l2-cache-size\": nothing of this name can be set here"),
            (r#"{"name": "other"}"#, "\"name\": nothing of this name"),
            (r#"{"bps-total": "lots"}"#, "bps-total=lots is not a size"),
        ] {
            let error = parse(body.as_bytes()).unwrap_err();
            assert!(error.contains(why), "{body}: {error}");
        }
        let deep = "[".repeat(10_000);
        assert!(parse(deep.as_bytes()).is_err());
    }
}
