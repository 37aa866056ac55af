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
    device::Devices,
    http::{Answer, Request},
    options::Given,
    record::Name,
    volumes::{self, Held, Volume, Volumes},
};

/// Request that names a volume.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Named {
    name: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Create {
    name: String,
    /// `null` without options.
    #[serde(default)]
    opts: Option<Given>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct User {
    name: String,
    #[serde(rename = "ID", default)]
    id: String,
}

/// Performs a request. `None` if the client disconnected while it waited for the volume: a result
/// that it never sees must not take effect.
pub(crate) fn answer<D: Devices>(
    request: &Request,
    volumes: &Volumes<D>,
    is_gone: &dyn Fn() -> bool,
) -> Option<Answer> {
    let call = Call { volumes, body: &request.body, is_gone };
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
        _ => return Some(refused(404, "the plugin protocol has no such request")),
    };
    match outcome {
        Ok(value) => Some(Answer { status: 200, body: value.to_string() }),
        Err(Stopped::Gone) => None,
        Err(Stopped::Refused(status, error)) => {
            let what = format!("{error:#}");
            tracing::info!(request = %request.path, error = %what, "refused");
            Some(refused(status, &what))
        }
    }
}

/// Error response.
pub(crate) fn refused(status: u16, what: &str) -> Answer {
    Answer { status, body: json!({ "Err": what }).to_string() }
}

enum Stopped {
    Gone,
    Refused(u16, anyhow::Error),
}

impl From<anyhow::Error> for Stopped {
    fn from(error: anyhow::Error) -> Self {
        Self::Refused(500, error)
    }
}

type Outcome = Result<Value, Stopped>;

struct Call<'a, D> {
    volumes: &'a Volumes<D>,
    body: &'a [u8],
    is_gone: &'a dyn Fn() -> bool,
}

impl<D: Devices> Call<'_, D> {
    fn create(&self) -> Outcome {
        let Create { name, opts } = self.read()?;
        let held = self.hold(&name)?;
        self.volumes.create(&held, opts.unwrap_or_default())?;
        tracing::info!(volume = name, "created");
        Ok(json!({ "Err": "" }))
    }

    fn remove(&self) -> Outcome {
        let Named { name } = self.read()?;
        let held = self.hold(&name)?;
        self.volumes.remove(&held)?;
        tracing::info!(volume = name, "removed");
        Ok(json!({ "Err": "" }))
    }

    fn mount(&self) -> Outcome {
        let User { name, id } = self.read()?;
        let held = self.hold(&name)?;
        let at = self.volumes.mount(&held, &id)?;
        tracing::info!(volume = name, user = id, "mounted");
        Ok(json!({ "Mountpoint": at, "Err": "" }))
    }

    fn unmount(&self) -> Outcome {
        let User { name, id } = self.read()?;
        let held = self.hold(&name)?;
        self.volumes.unmount(&held, &id)?;
        tracing::info!(volume = name, user = id, "unmounted");
        Ok(json!({ "Err": "" }))
    }

    fn path(&self) -> Outcome {
        Ok(json!({ "Mountpoint": place(self.look()?.mount_point), "Err": "" }))
    }

    fn get(&self) -> Outcome {
        let Volume { name, options, image, mount_point, users } = self.look()?;
        let status = json!({ "options": options, "image": image, "users": users.len() });
        Ok(json!({
            "Volume": { "Name": name.to_string(), "Mountpoint": place(mount_point), "Status": status },
            "Err": "",
        }))
    }

    fn list(&self) -> Outcome {
        let listed = |volume: Volume| json!({ "Name": volume.name.to_string(), "Mountpoint": place(volume.mount_point) });
        let volumes: Vec<_> = self.volumes.list()?.into_iter().map(listed).collect();
        Ok(json!({ "Volumes": volumes, "Err": "" }))
    }

    fn look(&self) -> Result<Volume, Stopped> {
        let Named { name } = self.read()?;
        let name = named(&name)?;
        Ok(self.volumes.look(&name)?.ok_or_else(|| anyhow!(volumes::no_such(&name)))?)
    }

    fn hold(&self, name: &str) -> Result<Held<'_>, Stopped> {
        let held = self.volumes.hold(named(name)?);
        // Checked after the wait for the lock, which may take minutes.
        if (self.is_gone)() { Err(Stopped::Gone) } else { Ok(held) }
    }

    fn read<T: DeserializeOwned>(&self) -> Result<T, Stopped> {
        let read = serde_json::from_slice(self.body);
        read.map_err(|error| Stopped::Refused(400, anyhow!("the request is malformed: {error}")))
    }
}

fn named(name: &str) -> Result<Name, Stopped> {
    Name::read(name).map_err(|what| Stopped::Refused(400, anyhow!(what)))
}

/// Path of the mount point; empty while unmounted, as Docker requires. UTF-8, as the volumes'
/// directory is.
fn place(mount_point: Option<PathBuf>) -> String {
    mount_point.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tempfile::TempDir;

    use super::*;
    use crate::{
        record::Store,
        volumes::tests::{Pretended, small},
    };

    fn start() -> (TempDir, Volumes<Pretended>) {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path()).unwrap();
        (directory, Volumes::new(store, Pretended::default(), "/nonexistent".as_ref()))
    }

    fn send(volumes: &Volumes<Pretended>, path: &str, body: impl Into<Vec<u8>>) -> (u16, Value) {
        let request = Request { path: path.to_owned(), body: body.into() };
        let answer = answer(&request, volumes, &|| false).expect("the client waits");
        (answer.status, serde_json::from_str(&answer.body).expect("it is JSON"))
    }

    fn call(volumes: &Volumes<Pretended>, what: &str, body: Value) -> (u16, Value) {
        send(volumes, &format!("/VolumeDriver.{what}"), body.to_string())
    }

    #[track_caller]
    fn done(volumes: &Volumes<Pretended>, what: &str, body: Value) -> Value {
        let (status, value) = call(volumes, what, body);
        assert_eq!((status, &value["Err"]), (200, &json!("")), "{value}");
        value
    }

    #[track_caller]
    fn fails(volumes: &Volumes<Pretended>, what: &str, body: Value, expect: u16) -> String {
        let (status, value) = call(volumes, what, body);
        assert_eq!(status, expect, "{value}");
        value["Err"].as_str().expect("it says why").to_owned()
    }

    #[test]
    fn the_life_of_a_volume() {
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
    fn a_request_that_makes_no_sense_says_why() {
        let (_directory, volumes) = start();
        let create = |opts: Value| fails(&volumes, "Create", json!({ "Name": "v", "Opts": opts }), 500);
        assert!(create(Value::Null).starts_with("size: is missing"));
        assert!(create(json!({ "size": "much" })).starts_with("size=much: is not a size"));
        for name in ["", "..", "../../etc", "a/b", "/etc"] {
            let said = fails(&volumes, "Create", json!({ "Name": name, "Opts": small() }), 400);
            assert!(said.contains("is not a volume name"), "{said}");
        }
        for (body, what) in
            [("", "EOF"), ("{", "EOF"), ("[]", "Name"), ("{}", "Name"), ("{\"Name\": 1}", "string")]
        {
            let (status, value) = send(&volumes, "/VolumeDriver.Mount", body);
            let said = value["Err"].as_str().unwrap();
            assert!(status == 400 && said.starts_with("the request is malformed: "), "{said}");
            assert!(body == "[]" || said.contains(what), "{said}");
        }
        let opts = json!({ "Name": "v", "Opts": { "size": 10 } });
        assert!(fails(&volumes, "Create", opts, 400).contains("expected a string"));
        assert_eq!(send(&volumes, "/VolumeDriver.Destroy", "{}").0, 404);
        assert_eq!(send(&volumes, "/", "{}").0, 404);
        let deep = "[".repeat(60_000);
        assert_eq!(send(&volumes, "/VolumeDriver.Create", deep).0, 400);
    }

    #[test]
    fn what_nobody_waits_for_is_not_begun() {
        let (_directory, volumes) = start();
        done(&volumes, "Create", json!({ "Name": "v", "Opts": small() }));
        let body = json!({ "Name": "v", "ID": "a" }).to_string().into_bytes();
        let request = Request { path: "/VolumeDriver.Mount".to_owned(), body };
        assert_eq!(answer(&request, &volumes, &|| true), None);
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
