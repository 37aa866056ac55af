//! A scenario: a small world with limits and clients, and a table of the results.

use console::table::{Side, Table};
use policy::{
    prefetch,
    throttle::{LimitKind, Limits},
};
use simulator::{
    client::{Client, ClientSpec},
    device::Place,
    engine::{Engine, Impossible, Row},
    world::{Disk, DiskSettings, UNKNOWN_SIZE, World},
};

use crate::result;

#[derive(Debug)]
pub(crate) struct Story {
    pub(crate) title: &'static str,
    pub(crate) columns: Vec<(&'static str, Side)>,
    pub(crate) rows: Vec<Vec<String>>,
    pub(crate) note: String,
    pub(crate) measures: Vec<(String, f64)>,
}

impl Story {
    pub(crate) fn text(&self) -> String {
        let mut table = Table::new(self.columns.clone());
        self.rows.iter().for_each(|row| table.row(row.clone()));
        format!("{}\n\n{}\n{}\n", self.title, table.render(false), self.note)
    }

    pub(crate) fn table(&self) -> result::Table {
        let columns = self.columns.iter().map(|(name, _)| *name);
        let note = Some(self.note.clone());
        result::Table { note, ..result::Table::new(self.title, columns, self.rows.clone()) }
    }
}

pub(super) fn disk(name: &str, limits: Limits, group: Option<usize>) -> Disk {
    Disk {
        name: name.to_owned(),
        hold: DiskSettings { limits, ..DiskSettings::default() },
        group,
        prefetch: prefetch::Settings::off(),
        size_bytes: UNKNOWN_SIZE,
        place: Place::default(),
        watched: None,
    }
}

pub(super) fn one_limit(kind: LimitKind, rate: u64) -> Limits {
    let mut limits = Limits::default();
    limits.limit_mut(kind).rate = rate;
    limits
}

pub(super) fn run(world: &World, clients: &[ClientSpec]) -> Result<Vec<Row>, Impossible> {
    let mut engine = Engine::new(world, true)?;
    clients.iter().for_each(|spec| engine.add_client(Client::new(spec.clone())));
    while engine.run(1 << 16) {}
    Ok(engine.take_rows().collect())
}
