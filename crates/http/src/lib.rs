//! The HTTP server: metrics for Prometheus, the web page and its API.
//!
//! ```text
//!   listen ─► sandbox ─► HttpServer::start ─► a thread with its own runtime           server
//!                                 │               │ --metrics: /metrics
//!   main thread   snapshot  ◄─────┴── requests ───┤ --http: /, /api/v1/…
//!      │             │                            │       by channel, answered within one poll
//!      │             └─► main_thread ─┬─► metric families ─► text, protobuf messages       metrics
//!      │                              └─► objects ─► JSON, and its changes           activity, api
//!      └─ performs changes that a client with a token requests
//! ```
//!
//! All figures come from `control`'s registry. The data path is separate: workers increment
//! counters, and the registry belongs to the main thread, which sends plain values. Every change is
//! a command of the control socket.

mod access;
mod activity;
mod api;
mod assets;
mod cgroup_metrics;
mod change;
mod connections;
mod families;
mod family_writer;
mod history;
mod job_metrics;
mod json_members;
mod labels;
mod limit_lines;
mod main_thread;
mod metrics;
mod objects;
mod page_state;
mod peer;
mod preview;
mod preview_input;
mod preview_thread;
mod process_metrics;
mod recent_counters;
mod responses;
mod sample;
mod server;
mod settings_body;
mod snapshot;
mod stall_timeout;
mod stream;
mod streamed_response;
mod token;

use std::{rc::Rc, sync::Arc, thread};

use anyhow::Context as _;
use control::{
    change::RegistryChange,
    events::EventLog,
    listen::{self, BoundListener, InheritedSockets},
    recording::RecentRequests,
    registry::Registry,
};
use reactor::ReactorWorker;
use settings::{ListenAddress, ListenEndpoint, SocketAccess};
use tls::TlsServer;

pub use token::ChangeToken;

use self::{
    access::AccessGuard,
    activity::{ActivityWatch, DaemonDescription},
    main_thread::{MainRequest, MainThread},
    preview_thread::Previews,
    server::{HttpListeners, HttpServiceKind},
    snapshot::DaemonSnapshot,
};

/// The HTTP thread. Dropping it stops the thread.
#[derive(Debug)]
pub struct HttpServer {
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
    _answering: reactor::JoinHandle<()>,
}

/// Listeners for metrics and for the page.
#[derive(Debug, Default)]
pub struct HttpEndpoints {
    /// Listeners for Prometheus.
    pub metrics: Option<Vec<BoundListener>>,
    /// The page and the API.
    pub page: Option<PageEndpoint>,
}

/// Listeners of the page, and its access rules.
#[derive(Debug)]
pub struct PageEndpoint {
    /// Sockets of the page.
    pub listeners: Vec<BoundListener>,
    /// Host names that are accepted in requests.
    pub names: Vec<String>,
    /// Token for changes; `None` makes the page read-only.
    pub token: Option<ChangeToken>,
    /// TLS credentials; `None` serves plain HTTP.
    pub tls: Option<TlsServer>,
}

/// Binds an address; `label` is the option's name in errors. Requests are accepted after
/// [`HttpServer::start`].
pub fn bind(
    label: &'static str,
    address: &ListenAddress,
    access: &SocketAccess,
) -> anyhow::Result<Vec<BoundListener>> {
    let endpoint = ListenEndpoint::Address(address.clone());
    listen::open_listeners(&endpoint, access, &mut InheritedSockets::empty()).context(label)
}

impl HttpEndpoints {
    /// True if nothing is served over HTTP.
    pub fn is_empty(&self) -> bool {
        self.metrics.is_none() && self.page.is_none()
    }
}

impl HttpServer {
    /// Starts the thread, which inherits the rights of the caller's thread, and enables measuring
    /// of disks.
    pub fn start(
        endpoints: HttpEndpoints,
        registry: &Rc<Registry>,
        workers: &Rc<Vec<ReactorWorker>>,
        cgroups: Option<cgroup::cgroup_counters::CgroupFiguresReader>,
    ) -> anyhow::Result<Self> {
        enable_measuring(registry);
        // Bounded: further requests wait at their sender, which times them out (`main_thread`).
        let (sender, receiver) = async_channel::bounded::<MainRequest>(1);
        let page_registry = Rc::clone(registry);
        let (registry, workers) = (Rc::clone(registry), Rc::clone(workers));
        let main_task = reactor::spawn_joinable(async move {
            while let Ok(request) = receiver.recv().await {
                // Sends fail if the requesting task timed out.
                match request {
                    MainRequest::Figures(reply) => {
                        drop(reply.send(DaemonSnapshot::take(&registry, &workers)));
                    }
                    MainRequest::PreviewInput(settings, reply) => {
                        drop(reply.send(preview_input::preview_input(&registry, settings)));
                    }
                    MainRequest::Change(settings, reply) => {
                        drop(reply.send(change::apply(&registry, settings).await));
                    }
                }
            }
        });
        let main_thread = MainThread::new(sender);
        let mut services = Vec::new();
        if let Some(listeners) = endpoints.metrics {
            tracing::info!(at = %addresses(&listeners), "metrics");
            services.push(HttpListeners {
                listeners,
                router: metrics::router(Arc::clone(&main_thread), cgroups),
                kind: HttpServiceKind::Metrics,
            });
        }
        let page = endpoints.page.map(|page| -> anyhow::Result<_> {
            let recent =
                page_registry.recordings.record_recent().context("the latest requests cannot be recorded")?;
            Ok(page.into_listeners(main_thread, recent, page_registry.events.clone()))
        });
        let (service, watch) = page.transpose()?.unzip();
        services.extend(service);
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let thread = thread::Builder::new().name("http".to_owned()).spawn(move || {
            let begin = || drop(watch.map(|watch| tokio::spawn(watch.run())));
            if let Err(error) = server::run(services, begin, stopped) {
                tracing::error!(%error, "the HTTP server has failed (restart weir)");
            }
        });
        let thread = thread.context("the HTTP thread cannot be started")?;
        Ok(Self { stop: Some(stop), thread: Some(thread), _answering: main_task })
    }
}

impl PageEndpoint {
    fn into_listeners(
        self,
        main_thread: Arc<MainThread>,
        recent: Arc<RecentRequests>,
        events: EventLog,
    ) -> (HttpListeners, Arc<ActivityWatch>) {
        let Self { listeners, names, token, tls: keys } = self;
        let scheme = if keys.is_some() { "https" } else { "http" };
        let access = if token.is_some() { "change" } else { "read" };
        tracing::info!(at = %addresses(&listeners), scheme, access, "page");
        let name = names.first().cloned().unwrap_or_else(host_name);
        let guard = AccessGuard::new(names, token.as_ref().map(ChangeToken::bytes));
        let daemon = DaemonDescription { name, has_token: guard.has_token() };
        let watch = ActivityWatch::new(Arc::clone(&main_thread), daemon, events.clone());
        let site = Arc::new(page_state::PageState {
            main_thread,
            previews: Previews::new(recent),
            watch: Arc::clone(&watch),
            events,
        });
        (
            HttpListeners { listeners, router: api::router(site, guard), kind: HttpServiceKind::Page(keys) },
            watch,
        )
    }
}

fn addresses(listeners: &[BoundListener]) -> String {
    listeners.iter().map(|listener| listener.authority.to_string()).collect::<Vec<_>>().join(" ")
}

/// Host name of this machine; empty if it is unreadable.
fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        // The thread's future ends with the sender; then the thread can be joined.
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The thread logged its own error.
            let _ = thread.join();
        }
    }
}

/// Enables measuring of all current and future disks.
fn enable_measuring(registry: &Rc<Registry>) {
    let every = |registry: &Registry| {
        for running in registry.disks.all() {
            running.disk.measure();
        }
    };
    every(registry);
    let later = Rc::downgrade(registry);
    registry.listen(move |change| {
        if let (Some(registry), RegistryChange::Listed { name }) = (later.upgrade(), change)
            && let Ok(running) = registry.disks.get(name)
        {
            running.disk.measure();
        }
    });
}
