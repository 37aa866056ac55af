//! Replays the last minutes under other limits before they are set.
//!
//! ```text
//!   body ─► main thread: settings after the change, by the rules of a change
//!        ─► a thread of lowest priority: recording of the last minutes ─► simulator::preview
//! ```
//!
//! One at a time: a newer request cancels the running one. Never changes a setting.

use std::{rc::Rc, sync::Arc, time::Duration};

use api::{Preview, PreviewFigures};
use axum::{
    Extension,
    body::Body,
    extract::{Path, State},
    http::StatusCode,
    response::Response,
};
use block::layer::throttle::{DiskSettings, ThrottleGroup};
use control::{
    qmp,
    registry::{Registry, RunningDisk},
};
use settings::LatencySetting;
use simulator::limit_preview::{PreviewDisk, PreviewGroup, PreviewResult};
use tokio::time::timeout;

use super::{
    main_thread::{ChangeError, ObjectKind, PreviewInput, SettingsRequest},
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
    let PreviewOutcome { past: interval, recorded: was, simulated: would } =
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
        requests: was.requests(),
        now: figures(&was),
        then: figures(&would),
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

/// Computes the settings after a change, on the main thread.
///
/// # Errors
/// Returns the errors of the change itself.
pub(super) fn preview_input(
    registry: &Registry,
    request: SettingsRequest,
) -> Result<PreviewInput, ChangeError> {
    let SettingsRequest { kind: of, name, settings, .. } = request;
    // The requests are replayed with their recorded service times, which no cap changes.
    if let Some(latency) =
        LatencySetting::ALL.into_iter().find(|latency| settings.contains_key(latency.name()))
    {
        return Err(ChangeError::Rejected(format!(
            "{}: a preview replays the service times of recorded requests, which a latency target would \
             change (apply it, and observe its state)",
            latency.name()
        )));
    }
    let unknown = |refused: control::registry::RegistryError| ChangeError::Unknown(refused.to_string());
    let changed = |before| qmp::settings_after(before, settings).map_err(ChangeError::Rejected);
    let disks = registry.disks.all();
    match of {
        ObjectKind::Disk => {
            let disk = registry.disks.get(&name).map_err(unknown)?;
            let after = DiskSettings::from(changed(disk.disk.throttle().settings().into())?);
            let after = DiskSettings { limits: after.limits.at_size(disk.disk.size_bytes()), ..after };
            let group = disk.disk.throttle().group();
            let mut then = match group {
                // All disks that share limits with this one affect its latency, so all are
                // replayed.
                Some(group) => GroupTree::of(&registry.groups.all(), &outermost(&group)).with_disks(&disks),
                None => GroupTree::default().with_disks(&[disk]),
            };
            // All disks of the tree are replayed, but only this one is reported.
            then.of.retain(|place| then.disks[*place].name == name);
            for place in &then.of {
                then.disks[*place].settings = after;
            }
            Ok(then)
        }
        ObjectKind::Group => {
            let group = registry.groups.get(&name).map_err(unknown)?;
            let after = changed(group.settings())?;
            // The command would be rejected as well.
            let checked = after.limits.validate_in_force();
            checked.map_err(|invalid| ChangeError::Rejected(invalid.to_string()))?;
            let family = GroupTree::of(&registry.groups.all(), &outermost(&group));
            let mut then = family.with_disks(&disks);
            let place = then.groups.iter().position(|known| known.name == name);
            if let Some(place) = place {
                then.groups[place].settings = after.into();
                // A change of a group is reported for the disks below it.
                let is_below = |disk: &PreviewDisk| {
                    std::iter::successors(disk.group, |group| then.groups[*group].parent)
                        .any(|group| group == place)
                };
                then.of.retain(|disk| is_below(&then.disks[*disk]));
            }
            Ok(then)
        }
    }
}

fn outermost(group: &Arc<ThrottleGroup>) -> Arc<ThrottleGroup> {
    std::iter::successors(Some(group), |group| group.parent())
        .last()
        .cloned()
        .unwrap_or_else(|| Arc::clone(group))
}

/// Groups of one tree, each after its parent, with the parent's index.
#[derive(Default)]
struct GroupTree(Vec<(Arc<ThrottleGroup>, Option<usize>)>);

impl GroupTree {
    fn of(groups: &[Arc<ThrottleGroup>], outermost: &Arc<ThrottleGroup>) -> Self {
        let mut family = vec![(Arc::clone(outermost), None)];
        let mut at = 0;
        while let Some((parent, _)) = family.get(at).cloned() {
            let is_inside =
                |group: &&Arc<ThrottleGroup>| group.parent().is_some_and(|above| Arc::ptr_eq(above, &parent));
            // Breadth first, so that parents precede their children.
            family.extend(groups.iter().filter(is_inside).map(|group| (Arc::clone(group), Some(at))));
            at += 1;
        }
        Self(family)
    }

    /// Adds the groups' disks; without groups, the disks that belong to none.
    fn with_disks(self, disks: &[Rc<RunningDisk>]) -> PreviewInput {
        let place =
            |group: &Arc<ThrottleGroup>| self.0.iter().position(|(known, _)| Arc::ptr_eq(known, group));
        let then = |running: &Rc<RunningDisk>| {
            let disk = &running.disk;
            let group = match disk.throttle().group() {
                Some(group) => Some(place(&group)?),
                None if self.0.is_empty() => None,
                None => return None,
            };
            let settings = DiskSettings { limits: disk.throttle().limits(), ..disk.throttle().settings() };
            let name = disk.name().to_string();
            Some(PreviewDisk { name, settings, group, recording: Vec::new() })
        };
        let disks: Vec<_> = disks.iter().filter_map(then).collect();
        let groups = self.0.iter().map(|(group, parent)| PreviewGroup {
            name: group.name().to_owned(),
            settings: DiskSettings { limits: group.limits(), ..group.settings().into() },
            parent: *parent,
        });
        PreviewInput { groups: groups.collect(), of: (0..disks.len()).collect(), disks }
    }
}
