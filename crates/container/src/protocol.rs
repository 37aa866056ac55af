//! Docker's volume plugin protocol: maps paths and JSON to operations, and results to JSON.
//!
//! Source: "Docker volume plugins" in Docker's documentation, as of Docker 1.13. Errors have status
//! 500 and a text in `Err`, as in Docker's own plugin library: Podman checks only the status,
//! Docker both.
//!
//! Unknown fields are ignored: later versions add some.

use std::path::PathBuf;

use anyhow::anyhow;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::{
    mounter::ImageMounter,
    options::OptionValues,
    plugin_http::{PluginRequest, PluginResponse},
    volume_store::VolumeName,
    volumes::{self, VolumeLock, VolumeState, Volumes},
};

/// Request that names a volume.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct NameRequest {
    name: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct CreateRequest {
    name: String,
    /// `null` without options.
    #[serde(default)]
    opts: Option<OptionValues>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct MountRequest {
    name: String,
    #[serde(rename = "ID", default)]
    id: String,
}

/// Performs a request. `None` if the client disconnected while it waited for the volume: a result
/// that it never sees must not take effect.
pub(crate) fn perform<D: ImageMounter>(
    request: &PluginRequest,
    volumes: &Volumes<D>,
    is_gone: &dyn Fn() -> bool,
) -> Option<PluginResponse> {
    let call = PluginCall { volumes, body: &request.body, is_gone };
    let outcome = match request.path.as_str() {
        "/Plugin.Activate" => Ok(json!({ "Implements": ["VolumeDriver"] })),
        // Local: each host has its own volumes.
        "/VolumeDriver.Capabilities" => Ok(json!({ "Capabilities": { "Scope": "local" }, "Err": "" })),
        "/VolumeDriver.Create" => call.create(),
        "/VolumeDriver.Remove" => call.remove(),
        "/VolumeDriver.Mount" => call.mount(),
        "/VolumeDriver.Unmount" => call.unmount(),
        "/VolumeDriver.Path" => call.path(),
        "/VolumeDriver.Get" => call.get(),
        "/VolumeDriver.List" => call.list(),
        _ => return Some(error_response(404, "the plugin protocol has no such request")),
    };
    match outcome {
        Ok(value) => Some(PluginResponse { status: 200, body: value.to_string() }),
        Err(CallError::Disconnected) => None,
        Err(CallError::Rejected(status, error)) => {
            let message = format!("{error:#}");
            tracing::info!(request = %request.path, error = %message, "refused");
            Some(error_response(status, &message))
        }
    }
}

/// Error response.
pub(crate) fn error_response(status: u16, message: &str) -> PluginResponse {
    PluginResponse { status, body: json!({ "Err": message }).to_string() }
}

enum CallError {
    Disconnected,
    Rejected(u16, anyhow::Error),
}

impl From<anyhow::Error> for CallError {
    fn from(error: anyhow::Error) -> Self {
        Self::Rejected(500, error)
    }
}

type CallResult = Result<Value, CallError>;

struct PluginCall<'a, D> {
    volumes: &'a Volumes<D>,
    body: &'a [u8],
    is_gone: &'a dyn Fn() -> bool,
}

impl<D: ImageMounter> PluginCall<'_, D> {
    fn create(&self) -> CallResult {
        let CreateRequest { name, opts } = self.read()?;
        let lock = self.lock(&name)?;
        self.volumes.create(&lock, opts.unwrap_or_default())?;
        tracing::info!(volume = name, "created");
        Ok(json!({ "Err": "" }))
    }

    fn remove(&self) -> CallResult {
        let NameRequest { name } = self.read()?;
        let lock = self.lock(&name)?;
        self.volumes.remove(&lock)?;
        tracing::info!(volume = name, "removed");
        Ok(json!({ "Err": "" }))
    }

    fn mount(&self) -> CallResult {
        let MountRequest { name, id } = self.read()?;
        let lock = self.lock(&name)?;
        let at = self.volumes.mount(&lock, &id)?;
        tracing::info!(volume = name, user = id, "mounted");
        Ok(json!({ "Mountpoint": at, "Err": "" }))
    }

    fn unmount(&self) -> CallResult {
        let MountRequest { name, id } = self.read()?;
        let lock = self.lock(&name)?;
        self.volumes.unmount(&lock, &id)?;
        tracing::info!(volume = name, user = id, "unmounted");
        Ok(json!({ "Err": "" }))
    }

    fn path(&self) -> CallResult {
        Ok(json!({ "Mountpoint": mount_point_text(self.volume()?.mount_point), "Err": "" }))
    }

    fn get(&self) -> CallResult {
        let VolumeState { name, options, image, mount_point, users } = self.volume()?;
        let status = json!({ "options": options, "image": image, "users": users.len() });
        Ok(json!({
            "Volume": { "Name": name.to_string(), "Mountpoint": mount_point_text(mount_point), "Status": status },
            "Err": "",
        }))
    }

    fn list(&self) -> CallResult {
        let listed = |volume: VolumeState| json!({ "Name": volume.name.to_string(), "Mountpoint": mount_point_text(volume.mount_point) });
        let volumes: Vec<_> = self.volumes.list()?.into_iter().map(listed).collect();
        Ok(json!({ "Volumes": volumes, "Err": "" }))
    }

    fn volume(&self) -> Result<VolumeState, CallError> {
        let NameRequest { name } = self.read()?;
        let name = parse_name(&name)?;
        Ok(self.volumes.state(&name)?.ok_or_else(|| anyhow!(volumes::unknown_volume(&name)))?)
    }

    fn lock(&self, name: &str) -> Result<VolumeLock<'_>, CallError> {
        let lock = self.volumes.lock(parse_name(name)?);
        // Checked after the wait for the lock, which may take minutes.
        if (self.is_gone)() { Err(CallError::Disconnected) } else { Ok(lock) }
    }

    fn read<T: DeserializeOwned>(&self) -> Result<T, CallError> {
        let read = serde_json::from_slice(self.body);
        read.map_err(|error| CallError::Rejected(400, anyhow!("the request is malformed: {error}")))
    }
}

fn parse_name(name: &str) -> Result<VolumeName, CallError> {
    VolumeName::read(name).map_err(|rule| CallError::Rejected(400, anyhow!(rule)))
}

/// Path of the mount point; empty while unmounted, as Docker requires. UTF-8, as the volumes'
/// directory is.
fn mount_point_text(mount_point: Option<PathBuf>) -> String {
    mount_point.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tempfile::TempDir;

    use super::*;
    use crate::{
        volume_store::VolumeStore,
        volumes::tests::{FakeMounter, small},
    };

    fn start() -> (TempDir, Volumes<FakeMounter>) {
        let directory = tempfile::tempdir().unwrap();
        let store = VolumeStore::open(directory.path()).unwrap();
        (directory, Volumes::new(store, FakeMounter::default(), "/nonexistent".as_ref()))
    }

    fn send(volumes: &Volumes<FakeMounter>, path: &str, body: impl Into<Vec<u8>>) -> (u16, Value) {
        let request = PluginRequest { path: path.to_owned(), body: body.into() };
        let response = perform(&request, volumes, &|| false).expect("the client waits");
        (response.status, serde_json::from_str(&response.body).expect("it is JSON"))
    }

    fn call(volumes: &Volumes<FakeMounter>, operation: &str, body: Value) -> (u16, Value) {
        send(volumes, &format!("/VolumeDriver.{operation}"), body.to_string())
    }

    #[track_caller]
    fn done(volumes: &Volumes<FakeMounter>, operation: &str, body: Value) -> Value {
        let (status, value) = call(volumes, operation, body);
        assert_eq!((status, &value["Err"]), (200, &json!("")), "{value}");
        value
    }

    #[track_caller]
    fn fails(volumes: &Volumes<FakeMounter>, operation: &str, body: Value, expect: u16) -> String {
        let (status, value) = call(volumes, operation, body);
        assert_eq!(status, expect, "{value}");
        value["Err"].as_str().expect("it says why").to_owned()
    }

    #[test]
    fn volume_life_cycle() {
        let (directory, volumes) = start();
        let (status, activated) = send(&volumes, "/Plugin.Activate", "");
        assert_eq!((status, activated), (200, json!({ "Implements": ["VolumeDriver"] })));
        assert_eq!(done(&volumes, "Capabilities", json!({}))["Capabilities"]["Scope"], "local");
        assert_eq!(send(&volumes, "/VolumeDriver.List", "").1["Volumes"], json!([]), "as Podman asks");

        done(&volumes, "Create", json!({ "Name": "v", "Opts": small() }));
        assert_eq!(done(&volumes, "Path", json!({ "Name": "v" }))["Mountpoint"], "");
        let at = directory.path().canonicalize().unwrap().join("v/mount");
        let mounted = done(&volumes, "Mount", json!({ "Name": "v", "ID": "a" }));
        assert_eq!(mounted["Mountpoint"], json!(at));
        assert_eq!(done(&volumes, "Path", json!({ "Name": "v" }))["Mountpoint"], json!(at));
        assert_eq!(
            done(&volumes, "Get", json!({ "Name": "v" }))["Volume"],
            json!({
                "Name": "v",
                "Mountpoint": at,
                "Status": { "options": small(), "image": at.with_file_name("disk.raw"), "users": 1 },
            })
        );
        assert_eq!(done(&volumes, "List", json!({}))["Volumes"], json!([{ "Name": "v", "Mountpoint": at }]));
        done(&volumes, "Unmount", json!({ "Name": "v", "ID": "a" }));
        done(&volumes, "Remove", json!({ "Name": "v" }));
        assert!(fails(&volumes, "Get", json!({ "Name": "v" }), 500).starts_with("there is no volume v"));
    }

    #[test]
    fn invalid_requests_name_the_reason() {
        let (_directory, volumes) = start();
        let create = |opts: Value| fails(&volumes, "Create", json!({ "Name": "v", "Opts": opts }), 500);
        assert!(create(Value::Null).starts_with("size: is missing"));
        assert!(create(json!({ "size": "much" })).starts_with("size=much: is not a size"));
        for name in ["", "..", "../../etc", "a/b", "/etc"] {
            let error = fails(&volumes, "Create", json!({ "Name": name, "Opts": small() }), 400);
            assert!(error.contains("is not a volume name"), "{error}");
        }
        for (body, expected) in
            [("", "EOF"), ("{", "EOF"), ("[]", "Name"), ("{}", "Name"), ("{\"Name\": 1}", "string")]
        {
            let (status, value) = send(&volumes, "/VolumeDriver.Mount", body);
            let error = value["Err"].as_str().unwrap();
            assert!(status == 400 && error.starts_with("the request is malformed: "), "{error}");
            assert!(body == "[]" || error.contains(expected), "{error}");
        }
        let opts = json!({ "Name": "v", "Opts": { "size": 10 } });
        assert!(fails(&volumes, "Create", opts, 400).contains("expected a string"));
        assert_eq!(send(&volumes, "/VolumeDriver.Destroy", "{}").0, 404);
        assert_eq!(send(&volumes, "/", "{}").0, 404);
        let nested = "[".repeat(60_000);
        assert_eq!(send(&volumes, "/VolumeDriver.Create", nested).0, 400);
    }

    #[test]
    fn requests_of_disconnected_clients_are_dropped() {
        let (_directory, volumes) = start();
        done(&volumes, "Create", json!({ "Name": "v", "Opts": small() }));
        let body = json!({ "Name": "v", "ID": "a" }).to_string().into_bytes();
        let request = PluginRequest { path: "/VolumeDriver.Mount".to_owned(), body };
        assert_eq!(perform(&request, &volumes, &|| true), None);
        assert_eq!(done(&volumes, "Path", json!({ "Name": "v" }))["Mountpoint"], "");
    }

    proptest! {
        #[test]
        fn no_body_is_too_much(
            body in prop::collection::vec(any::<u8>(), 0..200),
            what in prop::sample::select(vec!["Create", "Remove", "Mount", "Unmount", "Path", "Get"]),
        ) {
            let (_directory, volumes) = start();
            prop_assert_ne!(send(&volumes, &format!("/VolumeDriver.{what}"), body).0, 200);
        }
    }
}
