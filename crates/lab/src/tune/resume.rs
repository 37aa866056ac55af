//! The samples in a result file, for resuming an interrupted run. Samples of another target,
//! device, size, format or version are rejected, because they are not comparable.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};
use settings::exact_size;

use super::{
    configurations::{ConfigurationSpace, DiskConfiguration, RequestPattern},
    samples::TuneSamples,
    target::TuneTarget,
};
use crate::result::{ResultFile, ResultHeader, load};

/// A hundred of the longest runs.
const MAX_ROUNDS: u32 = 100_000;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct StoredSamples {
    path: String,
    /// A stable name, if the device has one.
    device: Option<String>,
    weir: String,
    pub(super) size_bytes: u64,
    clusters: Vec<u64>,
    slice_ns: u64,
    cells: Vec<StoredCell>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct StoredCell {
    configuration: String,
    pattern: String,
    rounds: Vec<u32>,
    operations_per_second: Vec<f64>,
}

impl StoredSamples {
    pub(super) fn new(place: &TuneTarget, slice: Duration, samples: &TuneSamples) -> Self {
        let mut cells = Vec::new();
        for configuration in &samples.configurations {
            for pattern in RequestPattern::all() {
                let (rounds, operations_per_second): (Vec<_>, Vec<_>) =
                    samples.cell(configuration, &pattern).unzip();
                if !rounds.is_empty() {
                    let (configuration, pattern) = (configuration.to_string(), pattern.to_string());
                    cells.push(StoredCell { configuration, pattern, rounds, operations_per_second });
                }
            }
        }
        Self {
            path: whole_name(&place.path),
            device: device(&place.path),
            weir: env!("CARGO_PKG_VERSION").to_owned(),
            size_bytes: place.size_bytes,
            clusters: place.space().clusters,
            slice_ns: u64::try_from(slice.as_nanos()).unwrap_or(u64::MAX),
            cells,
        }
    }

    pub(super) fn load(path: &Path) -> anyhow::Result<Self> {
        let ResultFile { details, .. } = load(path)?;
        serde_json::from_value(details).with_context(|| {
            format!("{}: has no samples of `weir tune` (name a file saved by its --result)", path.display())
        })
    }

    pub(super) fn slice(&self) -> Duration {
        Duration::from_nanos(self.slice_ns)
    }

    /// The samples, after a check that they belong to this target in its present state.
    pub(super) fn samples(
        &self,
        place: &TuneTarget,
        space: &ConfigurationSpace,
    ) -> anyhow::Result<TuneSamples> {
        let here = whole_name(&place.path);
        ensure!(self.path == here, "the samples to continue with belong to {}, not to {here}", self.path);
        ensure!(
            self.size_bytes == place.size_bytes,
            "the samples to continue with are for {} bytes, not for {} (give --size {})",
            self.size_bytes,
            place.size_bytes,
            self.size_bytes
        );
        // Samples of another device or version would bias the comparison without a visible sign.
        self.check_comparable(place, space)?;
        // Results store names, so the possible configurations are matched by name.
        let configurations: Vec<(String, DiskConfiguration)> =
            space.all().into_iter().map(|one| (one.to_string(), one)).collect();
        let patterns: Vec<(String, RequestPattern)> =
            RequestPattern::all().into_iter().map(|one| (one.to_string(), one)).collect();
        let mut samples = TuneSamples::default();
        for cell in &self.cells {
            // Skips configurations that this version or this machine lacks.
            let configuration = configurations.iter().find(|(name, _)| *name == cell.configuration);
            let pattern = patterns.iter().find(|(name, _)| *name == cell.pattern);
            let (Some((_, configuration)), Some((_, pattern))) = (configuration, pattern) else { continue };
            ensure!(
                cell.rounds.iter().all(|&round| round < MAX_ROUNDS),
                "the samples to continue with are corrupt: the number of rounds is too large \
                 (start again without --resume)"
            );
            for (round, value) in cell.rounds.iter().zip(&cell.operations_per_second) {
                samples.add(*configuration, *pattern, *round, *value);
            }
        }
        Ok(samples)
    }
}

impl StoredSamples {
    fn check_comparable(&self, place: &TuneTarget, space: &ConfigurationSpace) -> anyhow::Result<()> {
        let name = |device: Option<&str>| device.unwrap_or("an unknown device").to_owned();
        let clusters = |clusters: &[u64]| match clusters {
            [] => "a raw disk".to_owned(),
            sizes => format!(
                "clusters of {}",
                sizes.iter().copied().map(exact_size).collect::<Vec<_>>().join(", ")
            ),
        };
        let differences = [
            ("on the device", name(self.device.as_deref()), name(device(&place.path).as_deref())),
            ("by weir", self.weir.clone(), env!("CARGO_PKG_VERSION").to_owned()),
            ("of", clusters(&self.clusters), clusters(&space.clusters)),
        ];
        for (property, stored, here) in differences {
            ensure!(
                stored == here,
                "the samples to continue with are {property} {stored}, not {here}: they cannot be \
                 compared (start again without --resume)"
            );
        }
        Ok(())
    }
}

fn device(path: &Path) -> Option<String> {
    ResultHeader::begin().end(Some(path)).device.map(|device| device.key)
}

/// Absolute path: runs may start in different directories.
fn whole_name(path: &Path) -> String {
    path.canonicalize().unwrap_or_else(|_| path.to_owned()).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tune::target::TuneTargetOptions;

    fn place(directory: &Path, size_bytes: u64) -> TuneTarget {
        let size_bytes = Some(size_bytes);
        let options = TuneTargetOptions {
            path: directory,
            size_bytes,
            format: None,
            write: false,
            force: false,
            budget_seconds: 9,
        };
        TuneTarget::open(options, |_, _, _| unreachable!("a directory has no image")).unwrap()
    }

    #[test]
    fn samples_resume_on_the_same_target_only() {
        let directory = tempfile::tempdir().unwrap();
        let here = place(directory.path(), 16 << 20);
        let space = here.space();
        let (configuration, pattern) = (space.all()[5], RequestPattern::all()[3]);
        let mut samples = TuneSamples::default();
        samples.add(configuration, pattern, 2, 100.5);
        samples.add(configuration, pattern, 4, 99.0);
        let stored = StoredSamples::new(&here, Duration::from_millis(20), &samples);
        let text = serde_json::to_string(&stored).unwrap();
        let reloaded: StoredSamples = serde_json::from_str(&text).unwrap();
        let found = reloaded.samples(&here, &space).unwrap();
        assert!(found.cell(&configuration, &pattern).eq([(2, 100.5), (4, 99.0)]));
        assert_eq!(reloaded.slice(), Duration::from_millis(20));
        let larger = place(directory.path(), 32 << 20);
        let message = reloaded.samples(&larger, &space).unwrap_err().to_string();
        assert!(message.ends_with("(give --size 16777216)"), "{message}");
        let elsewhere = tempfile::tempdir().unwrap();
        let message = reloaded.samples(&place(elsewhere.path(), 16 << 20), &space).unwrap_err().to_string();
        assert!(message.contains("not to"), "{message}");
        let message_after = |change: fn(&mut StoredSamples)| {
            let mut changed = reloaded.clone();
            change(&mut changed);
            changed.samples(&here, &space).unwrap_err().to_string()
        };
        assert!(
            message_after(|changed| changed.weir = "0.0.0".to_owned()).contains("are by weir 0.0.0, not ")
        );
        assert!(
            message_after(|changed| changed.device = Some("other".to_owned()))
                .contains("are on the device other, not ")
        );
        assert!(
            message_after(|changed| changed.clusters = vec![4096])
                .contains("are of clusters of 4K, not clusters of 64K, ")
        );
        assert!(message_after(|changed| changed.cells[0].rounds[1] = u32::MAX).contains("are corrupt"));
    }
}
