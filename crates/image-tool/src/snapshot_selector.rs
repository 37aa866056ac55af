//! `-l`: selects an internal snapshot to read instead of the disk, in qemu-img's notation.

use std::{path::Path, str::FromStr};

use anyhow::{Context as _, bail};
use image::qcow2::snapshot::InternalSnapshot;
use storage::ImageFormat;

use super::{
    opening::{self, OpenMode},
    options::FormatOptions,
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SnapshotSelector {
    /// Snapshot with this id, or else with this name.
    Either(String),
    /// Snapshot with all of the given attributes.
    Exactly { id: Option<String>, name: Option<String> },
}

impl FromStr for SnapshotSelector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if !text.starts_with("snapshot.") {
            return Ok(Self::Either(text.to_owned()));
        }
        let mut options = FormatOptions::read(&[text.to_owned()])?;
        let (id, name) = (options.take("snapshot.id"), options.take("snapshot.name"));
        match options.first_unused() {
            None => Ok(Self::Exactly { id, name }),
            Some(key) => Err(format!("{key}: is neither snapshot.id nor snapshot.name")),
        }
    }
}

impl SnapshotSelector {
    pub(super) async fn id(
        &self,
        path: &Path,
        format: Option<ImageFormat>,
        mode: OpenMode,
    ) -> anyhow::Result<String> {
        let name = path.display();
        if opening::format(path, format)? == ImageFormat::Raw {
            bail!("{name}: raw images have no snapshots (leave -l out)");
        }
        let snapshots = opening::snapshots_in(&opening::storage(path, mode)?, path).await?;
        let found = self.find(&snapshots);
        let found = found
            .with_context(|| format!("{name}: has no such snapshot (`weir image snapshot -l` lists all)"))?;
        Ok(found.id().into_owned())
    }

    fn find<'a>(&self, snapshots: &'a [InternalSnapshot]) -> Option<&'a InternalSnapshot> {
        match self {
            Self::Either(id_or_name) => {
                InternalSnapshot::find(snapshots, id_or_name).map(|index| &snapshots[index])
            }
            Self::Exactly { id, name } => {
                let is_match = |wanted: &Option<String>, actual: &[u8]| {
                    wanted.as_ref().is_none_or(|wanted| wanted.as_bytes() == actual)
                };
                snapshots.iter().find(|snapshot| is_match(id, &snapshot.id) && is_match(name, &snapshot.name))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Option<String> {
        let snapshot = |id: &str, name: &str| InternalSnapshot {
            id: id.into(),
            name: name.into(),
            ..InternalSnapshot::default()
        };
        let snapshots = [snapshot("1", "2"), snapshot("2", "one"), snapshot("3", "one")];
        text.parse::<SnapshotSelector>().unwrap().find(&snapshots).map(|matched| matched.id().into_owned())
    }

    #[test]
    fn snapshots_are_found_by_id_and_by_name() {
        for (text, id) in [
            ("2", Some("2")),
            ("one", Some("2")),
            ("snapshot.name=2", Some("1")),
            ("snapshot.id=3,snapshot.name=one", Some("3")),
            ("snapshot.id=1,snapshot.name=one", None),
            ("snapshot.id=one", None),
            ("none", None),
        ] {
            assert_eq!(found(text).as_deref(), id, "{text}");
        }
        let error = "snapshot.ID=1".parse::<SnapshotSelector>().unwrap_err();
        assert_eq!(error, "snapshot.ID: is neither snapshot.id nor snapshot.name");
    }
}
