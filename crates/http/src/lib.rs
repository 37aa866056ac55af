//! What people and their tools read over HTTP: figures for Prometheus, and the page.
//!
//! ```text
//!   listen ─► … ─► sandbox ─► Http::start ─► a thread with a runtime of its own     server
//!                                 │               │ --metrics: /metrics
//!   main thread   snapshot  ◄─────┴── asked ──────┤ --http: /, /api/v1/…
//!      │             │                            │       by channel, answered within a turn of its
//!      │             └──► desk ──► families of figures ─► text, Prometheus's messages   metrics
//!      │                    └────► objects ─► JSON, what is new of it                  watch, api
//!      └─ carries out what somebody with a token wants changed
//! ```
//!
//! All figures are those of `control`'s registry. The data path is separate: workers add to
//! counters, and the registry belongs to the main thread, which passes plain values. Every change
//! is a command of the control socket.

mod access;
mod answers;
mod api;
mod assets;
mod body;
mod cgroups;
mod change;
mod connections;
mod desk;
mod families;
mod history;
mod lately;
mod lines;
mod metrics;
mod objects;
mod patient;
mod peer;
mod pieces;
mod preview;
mod previews;
mod process;
mod said;
mod sample;
mod server;
mod site;
mod snapshot;
mod stream;
mod token;
mod watch;
mod words;
mod writer;

use std::{rc::Rc, sync::Arc, thread};

use anyhow::Context as _;
use control::{
    change::Change,
    events::Events,
    listen::{self, Inherited, Listener},
    recording::Recent,
    registry::Registry,
};
use reactor::Worker;
use settings::{Address, Endpoint, SocketAccess};
use tls::TlsServer;

pub use token::Token;

use self::{
    access::Guard,
    desk::{Asked, Desk},
    previews::Previews,
    server::{Kind, Place},
    snapshot::Snapshot,
    watch::{About, Watch},
};

/// The thread that answers; dropping this ends it.
#[derive(Debug)]
pub struct Http {
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
    _answering: reactor::JoinHandle<()>,
}

/// What is to be answered where.
#[derive(Debug, Default)]
pub struct Doors {
    /// Where Prometheus asks.
    pub metrics: Option<Vec<Listener>>,
    /// The page and the API.
    pub page: Option<Page>,
}

/// Where the page is, and under which conditions.
#[derive(Debug)]
pub struct Page {
    /// Their sockets.
    pub listeners: Vec<Listener>,
    /// Host names that requests may give.
    pub names: Vec<String>,
    /// None: nobody may change anything.
    pub token: Option<Token>,
    /// None: in plain text.
    pub keys: Option<TlsServer>,
}

/// Binds the address, which is for `what`; nobody is answered yet.
pub fn bind(what: &'static str, address: &Address, access: &SocketAccess) -> anyhow::Result<Vec<Listener>> {
    let endpoint = Endpoint::Address(address.clone());
    listen::open(&endpoint, access, &mut Inherited::none()).context(what)
}

impl Doors {
    /// True if nothing is served over HTTP.
    pub fn is_empty(&self) -> bool {
        self.metrics.is_none() && self.page.is_none()
    }
}

impl Http {
    /// Answers whoever connects, from a thread that has what rights this one has. Disks are
    /// measured from now on.
    pub fn start(
        doors: Doors,
        registry: &Rc<Registry>,
        workers: &Rc<Vec<Worker>>,
        cgroups: Option<cgroup::figures::Reader>,
    ) -> anyhow::Result<Self> {
        measure(registry);
        let (ask, asked) = async_channel::bounded::<Asked>(1);
        let remembering = Rc::clone(registry);
        let (registry, workers) = (Rc::clone(registry), Rc::clone(workers));
        let answering = reactor::spawn_joinable(async move {
            while let Ok(asked) = asked.recv().await {
                // Whoever asked may have given up.
                match asked {
                    Asked::Figures(answer) => drop(answer.send(Snapshot::take(&registry, &workers))),
                    Asked::Foresee(wanted, answer) => drop(answer.send(preview::foresee(&registry, wanted))),
                    Asked::Change(wanted, answer) => {
                        drop(answer.send(change::carry_out(&registry, wanted).await));
                    }
                }
            }
        });
        let desk = Desk::new(ask);
        let mut places = Vec::new();
        if let Some(listeners) = doors.metrics {
            tracing::info!(at = %addresses(&listeners), "metrics");
            places.push(Place {
                listeners,
                router: metrics::router(Arc::clone(&desk), cgroups),
                kind: Kind::Metrics,
            });
        }
        let page = doors.page.map(|page| -> anyhow::Result<_> {
            let recent = remembering.recordings.remember().context("what disks are asked cannot be kept")?;
            Ok(page.place(desk, recent, remembering.events.clone()))
        });
        let (place, watch) = page.transpose()?.unzip();
        places.extend(place);
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let thread = thread::Builder::new().name("http".to_owned()).spawn(move || {
            let begin = || drop(watch.map(|watch| tokio::spawn(watch.run())));
            if let Err(error) = server::run(places, begin, stopped) {
                tracing::error!(%error, "nothing can be had over HTTP (restart weir)");
            }
        });
        let thread = thread.context("the thread that answers over HTTP")?;
        Ok(Self { stop: Some(stop), thread: Some(thread), _answering: answering })
    }
}

impl Page {
    fn place(self, desk: Arc<Desk>, recent: Arc<Recent>, events: Events) -> (Place, Arc<Watch>) {
        let Self { listeners, names, token, keys } = self;
        let scheme = if keys.is_some() { "https" } else { "http" };
        let may = if token.is_some() { "change" } else { "read" };
        tracing::info!(at = %addresses(&listeners), scheme, may, "page");
        let name = names.first().cloned().unwrap_or_else(host_name);
        let guard = Guard::new(names, token.as_ref().map(Token::bytes));
        let about = About { name, has_token: guard.has_token() };
        let watch = Watch::new(Arc::clone(&desk), about, events.clone());
        let site =
            Arc::new(site::Site { desk, previews: Previews::new(recent), watch: Arc::clone(&watch), events });
        (Place { listeners, router: api::router(site, guard), kind: Kind::Page(keys) }, watch)
    }
}

fn addresses(listeners: &[Listener]) -> String {
    listeners.iter().map(|listener| listener.authority.to_string()).collect::<Vec<_>>().join(" ")
}

/// What this host calls itself; empty where it does not.
fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
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
fn measure(registry: &Rc<Registry>) {
    let every = |registry: &Registry| {
        for running in registry.disks.all() {
            running.disk.measure();
        }
    };
    every(registry);
    let later = Rc::downgrade(registry);
    registry.listen(move |change| {
        if let (Some(registry), Change::Listed { name }) = (later.upgrade(), change)
            && let Ok(running) = registry.disks.get(name)
        {
            running.disk.measure();
        }
    });
}
