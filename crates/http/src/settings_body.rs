//! Request bodies with settings, for changes and previews.
//!
//! The settings are those of `weir throttle`: limits, weight, reservations, the watermark and the
//! latency target.
//! Numbers may be strings with a unit (`"10M"`). Never decides a rule, and bounds the time that a
//! client may take.

use std::time::Duration;

use axum::{
    body::{Body, to_bytes},
    http::StatusCode,
    response::Response,
};
use policy::throttle::LimitSetting;
use serde_json::{Map, Value};
use settings::{LatencySetting, QuotaSetting, suggest};
use tokio::time::timeout;

use super::{
    json_members::{self, JsonMembers},
    main_thread::{ObjectKind, SettingsRequest},
    peer::HttpPeer,
    responses::error_response,
};

/// Largest body in bytes; all settings together take less than 1 KiB.
const MAX_BODY_BYTES: usize = 16 << 10;
/// Time within which the body has to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// Settings other than limits and latency targets.
const OTHER_SETTINGS: [&str; 4] = ["weight", "iops-reservation", "bps-reservation", "watermark"];

/// Reads the settings for a disk or a group.
///
/// # Errors
/// Returns the error response.
pub(super) async fn read(
    kind: ObjectKind,
    name: String,
    peer: HttpPeer,
    body: Body,
) -> Result<SettingsRequest, Response> {
    match numbers(body).await {
        Ok(settings) => Ok(SettingsRequest { kind, name, settings, client: peer.to_string() }),
        Err((status, why)) => Err(error_response(status, &why)),
    }
}

/// Reads the settings as numbers.
async fn numbers(body: Body) -> Result<Map<String, Value>, (StatusCode, String)> {
    let bytes = timeout(BODY_TIMEOUT, to_bytes(body, MAX_BODY_BYTES)).await;
    let bytes =
        bytes.map_err(|_| (StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time".to_owned()))?;
    let bytes = bytes.map_err(|_| {
        (
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("the body is incomplete, or longer than {MAX_BODY_BYTES} bytes"),
        )
    })?;
    parse(&bytes).map_err(|why| (StatusCode::UNPROCESSABLE_ENTITY, why))
}

/// Names of all settings.
fn setting_names() -> impl Iterator<Item = &'static str> {
    let latency = LatencySetting::ALL.map(LatencySetting::name);
    let quota = QuotaSetting::ALL.map(QuotaSetting::name);
    LimitSetting::of_disk().map(LimitSetting::name).chain(OTHER_SETTINGS).chain(latency).chain(quota)
}

fn parse(body: &[u8]) -> Result<Map<String, Value>, String> {
    let JsonMembers(members) = serde_json::from_slice(body)
        .map_err(|error| format!("the body is not a JSON object: {error} (send {{\"iops-total\": 2000}})"))?;
    let number = |(key, value): (String, Value)| {
        if !setting_names().any(|name| name == key) {
            // A mistyped key must not be ignored: the change would be incomplete.
            let near = suggest::nearest(&key, setting_names());
            let near = near.map(|near| format!(" (did you mean {near}?)")).unwrap_or_default();
            return Err(format!("{key:?}: cannot be set here{near}"));
        }
        let value = json_members::parse_number(&key, value)?;
        Ok((key, value))
    };
    members.into_iter().map(number).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_may_have_units() {
        let read = parse(br#"{"bps-total": "10M", "iops-total": 2000, "weight": 300}"#).unwrap();
        assert_eq!(Value::Object(read), json!({"bps-total": 10 << 20, "iops-total": 2000, "weight": 300}));
    }

    #[test]
    fn openapi_lists_exactly_the_settings() {
        let described: Value =
            serde_json::from_str(include_str!("../../../docs/reference/openapi.json")).unwrap();
        let changes = &described["components"]["schemas"]["Changes"];
        let mut names: Vec<_> = setting_names().collect();
        names.sort_unstable();
        let mut listed: Vec<_> = changes["properties"].as_object().unwrap().keys().collect();
        listed.sort_unstable();
        assert_eq!(listed, names);
        assert_eq!(changes["additionalProperties"], false);
    }

    #[test]
    fn mistakes_are_named() {
        for (body, why) in [
            ("", "not a JSON object: EOF"),
            ("[1]", "not a JSON object"),
            (r#"{"iops-totl": 1}"#, "\"iops-totl\": cannot be set here (did you mean iops-total?)"),
            (r#"{"l2-cache-size": 1}"#, "\"l2-cache-size\": cannot be set here"),
            (r#"{"name": "other"}"#, "\"name\": cannot be set here"),
            (r#"{"bps-total": "lots"}"#, "bps-total=lots is not a size"),
            (r#"{"iops-total": "0.4"}"#, "iops-total=0.4 is not a whole number of 0 or more"),
            (r#"{"iops-total": 100, "iops-total": 200}"#, "\"iops-total\" is given twice"),
        ] {
            let error = parse(body.as_bytes()).unwrap_err();
            assert!(error.contains(why), "{body}: {error}");
        }
        let deep = "[".repeat(10_000);
        assert!(parse(deep.as_bytes()).is_err());
    }
}
