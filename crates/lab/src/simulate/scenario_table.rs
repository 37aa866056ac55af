//! A scenario: a small world with limits and clients, and a table of the results.

use console::table::{ColumnAlignment, TextTable};
use policy::{
    prefetch,
    throttle::{LimitKind, Limits},
};
use simulator::{
    client::{ClientSpec, ClosedLoopClient},
    device::DevicePlacement,
    engine::{ResultRow, SimulationEngine, WorldError},
    world::{DiskSettings, DiskSpec, UNKNOWN_SIZE, WorldSpec},
};

use crate::result;

#[derive(Debug)]
pub(crate) struct ScenarioTable {
    pub(crate) title: &'static str,
    pub(crate) columns: Vec<(&'static str, ColumnAlignment)>,
    pub(crate) rows: Vec<Vec<String>>,
    pub(crate) note: String,
    pub(crate) measures: Vec<(String, f64)>,
}

impl ScenarioTable {
    pub(crate) fn text(&self) -> String {
        let mut table = TextTable::new(self.columns.clone());
        self.rows.iter().for_each(|row| table.row(row.clone()));
        format!("{}\n\n{}\n{}\n", self.title, table.render(false), self.note)
    }

    pub(crate) fn table(&self) -> result::ResultTable {
        let columns = self.columns.iter().map(|(name, _)| *name);
        let note = Some(self.note.clone());
        result::ResultTable { note, ..result::ResultTable::new(self.title, columns, self.rows.clone()) }
    }
}

pub(super) fn disk(name: &str, limits: Limits, group: Option<usize>) -> DiskSpec {
    DiskSpec {
        name: name.to_owned(),
        settings: DiskSettings { limits, ..DiskSettings::default() },
        group,
        prefetch: prefetch::PrefetchConfig::off(),
        size_bytes: UNKNOWN_SIZE,
        place: DevicePlacement::default(),
        sampled_device: None,
    }
}

pub(super) fn one_limit(kind: LimitKind, rate: u64) -> Limits {
    let mut limits = Limits::default();
    limits.limit_mut(kind).rate = rate;
    limits
}

pub(super) fn run(world: &WorldSpec, clients: &[ClientSpec]) -> Result<Vec<ResultRow>, WorldError> {
    let mut engine = SimulationEngine::new(world, true)?;
    clients.iter().for_each(|spec| engine.add_client(ClosedLoopClient::new(spec.clone())));
    while engine.run(1 << 16) {}
    Ok(engine.take_rows().collect())
}
