//! `nbd-compio`: a minimal NBD server on compio, the peer in weir's runtime comparison.
//!
//! weir has an executor of its own. This server does the same work in the same way (many requests
//! per receive, a task per request, vectored replies, pooled aligned buffers) on compio's public,
//! safe API.
//!
//! ```text
//!  socket ─► Inbox ─► serve_requests ─► a task per request ─► Storage
//!                                              │ reply
//!  socket ◄──────────── send_replies ◄── Outbox┘
//! ```
//!
//! A measuring instrument without TLS, limits and structured replies. It must never serve data that
//! matters, and nothing in weir may depend on it.

mod buffer;
mod inbox;
mod negotiation;
mod storage;
mod transmission;

use std::cell::Cell;
use std::io;
use std::pin::pin;
use std::process::ExitCode;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use compio::driver::ProactorBuilder;
use compio::net::{UnixListener, UnixStream};
use compio::runtime::{Runtime, RuntimeBuilder};

use inbox::Inbox;
use storage::Storage;

const USAGE: &str = "usage: nbd-compio memory:SIZE|FILE unix:PATH [--poll-us N]";

/// Replies sent by all connections; tells a busy server from an idle one.
type Served = Rc<Cell<u64>>;

struct Arguments {
    image: String,
    socket: String,
    /// Time to look for completions before sleeping.
    poll: Duration,
}

fn main() -> ExitCode {
    let Some(arguments) = parse(std::env::args().skip(1).collect()) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nbd-compio: {error}");
            ExitCode::FAILURE
        }
    }
}

fn parse(arguments: Vec<String>) -> Option<Arguments> {
    let (image, listen, poll_us) = match arguments.as_slice() {
        [image, listen] => (image, listen, 0),
        [image, listen, option, value] if option == "--poll-us" => (image, listen, value.parse().ok()?),
        _ => return None,
    };
    let socket = listen.strip_prefix("unix:").filter(|path| !path.is_empty())?;
    Some(Arguments { image: image.clone(), socket: socket.to_owned(), poll: Duration::from_micros(poll_us) })
}

fn run(arguments: &Arguments) -> io::Result<()> {
    let mut proactor = ProactorBuilder::new();
    // Completions run when this thread waits; coop_taskrun and taskrun_flag gained nothing more.
    proactor.single_issuer(true).defer_taskrun(true);
    let runtime = RuntimeBuilder::new().with_proactor(proactor).build()?;
    let served = Served::default();
    let server = serve(arguments.image.clone(), arguments.socket.clone(), served.clone());
    if arguments.poll.is_zero() {
        runtime.block_on(server)
    } else {
        block_on_polling(&runtime, server, arguments.poll, &served)
    }
}

/// Polls for `window` after the last reply, for a fair comparison with a polling weir.
fn block_on_polling<F: Future>(runtime: &Runtime, future: F, window: Duration, served: &Served) -> F::Output {
    runtime.enter(|| {
        let mut future = pin!(future);
        let waker = runtime.waker();
        let mut last_work = (served.get(), Instant::now());
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                return output;
            }
            let more_to_run = runtime.run();
            if served.get() != last_work.0 {
                last_work = (served.get(), Instant::now());
            }
            if more_to_run || last_work.1.elapsed() < window {
                runtime.poll_with(Some(Duration::ZERO));
            } else {
                runtime.poll();
            }
        }
    })
}

async fn serve(image: String, socket: String, served: Served) -> io::Result<()> {
    let storage = Rc::new(Storage::open(&image).await?);
    let listener = UnixListener::bind(&socket).await.map_err(|error| {
        io::Error::new(error.kind(), format!("{socket}: {error} (remove a stale socket)"))
    })?;
    loop {
        let (stream, _) = listener.accept().await?;
        let (storage, served) = (storage.clone(), served.clone());
        compio::runtime::spawn(async move {
            if let Err(error) = serve_client(stream, storage, served).await {
                eprintln!("nbd-compio: client: {error}");
            }
        })
        .detach();
    }
}

async fn serve_client(stream: UnixStream, storage: Rc<Storage>, served: Served) -> io::Result<()> {
    let mut inbox = Inbox::new(stream);
    if negotiation::negotiate(&mut inbox, &storage).await? {
        transmission::serve_requests(inbox, storage, served).await?;
    }
    Ok(())
}
