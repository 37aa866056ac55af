//! What people and their tools read over HTTP: figures for Prometheus.
//!
//! ```text
//!   listen ─► … ─► sandbox ─► Http::start ─► a thread with a runtime of its own     server
//!                                 │               │ GET /metrics
//!   main thread   snapshot  ◄─────┴── asked ──────┘ by channel, answered within a turn of its
//!                    └────────► families of figures ─► text, or Prometheus's messages  page, families
//! ```
//!
//! A part of the daemon and no crate of its own: all that it tells is the inventory's. Apart from
//! the data path: workers only add to counters, and the inventory belongs to the main thread, which
//! hands over plain values. Never changes anything.

mod cgroups;
mod families;
mod page;
mod process;
mod server;
mod snapshot;
mod words;
mod writer;

use std::{rc::Rc, thread};

use anyhow::Context as _;
use block::reactor::{self, Worker};
use settings::{Address, Endpoint, SocketAccess};

use self::snapshot::Snapshot;
use crate::{
    control::{change::Change, inventory::Inventory},
    listen::{self, Inherited, Listener},
};

/// The thread that answers; dropping this ends it.
#[derive(Debug)]
pub(crate) struct Http {
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
    _answering: reactor::JoinHandle<()>,
}

/// Binds the address; nobody is answered yet.
pub(crate) fn bind(address: &Address, access: &SocketAccess) -> anyhow::Result<Vec<Listener>> {
    let endpoint = Endpoint::Address(address.clone());
    listen::open(&endpoint, access, &mut Inherited::none()).context("metrics")
}

impl Http {
    /// Answers whoever connects, from a thread that has what rights this one has. Disks are
    /// measured from now on.
    pub(crate) fn start(
        listeners: Vec<Listener>,
        inventory: &Rc<Inventory>,
        workers: &Rc<Vec<Worker>>,
        cgroups: Option<cgroup::figures::Reader>,
    ) -> anyhow::Result<Self> {
        measure(inventory);
        let addresses: Vec<_> = listeners.iter().map(|listener| listener.authority.to_string()).collect();
        let (ask, asked) = async_channel::bounded::<page::Asked>(1);
        let (inventory, workers) = (Rc::clone(inventory), Rc::clone(workers));
        let answering = reactor::spawn_joinable(async move {
            while let Ok(answer) = asked.recv().await {
                // Whoever asked may have given up.
                let _ = answer.send(Snapshot::take(&inventory, &workers));
            }
        });
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let thread = thread::Builder::new().name("http".to_owned()).spawn(move || {
            if let Err(error) = server::run(listeners, &page::router(ask, cgroups), stopped) {
                tracing::error!(%error, "no figures can be had over HTTP (restart weir)");
            }
        });
        let thread = thread.context("the thread that answers over HTTP")?;
        tracing::info!(at = %addresses.join(" "), "metrics");
        Ok(Self { stop: Some(stop), thread: Some(thread), _answering: answering })
    }
}

impl Drop for Http {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It has said what went wrong.
            let _ = thread.join();
        }
    }
}

/// All disks, and those that come.
fn measure(inventory: &Rc<Inventory>) {
    let every = |inventory: &Inventory| {
        for running in inventory.disks() {
            running.disk.measure();
        }
    };
    every(inventory);
    let later = Rc::downgrade(inventory);
    inventory.listen(move |change| {
        if let (Some(inventory), Change::Listed { name }) = (later.upgrade(), change)
            && let Ok(running) = inventory.disk(name)
        {
            running.disk.measure();
        }
    });
}
