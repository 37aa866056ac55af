//! A disk for a virtual machine at work: its server, its socket, and the thread that attends to its
//! front end, which is the main one.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
};

use anyhow::{anyhow, ensure};
use block::{
    disk::Disk,
    reactor::{self, JoinHandle, Worker, op::Fd},
    storage::CacheMode,
};
use export::{
    vhost_user_blk::{Export, FrontEnds, Offer, Server, Threads},
    virtio::block::SECTOR_BYTES,
};
use settings::{Address, Endpoint, SocketAccess, VhostUserBlk};

use crate::listen::{self, SocketFile};

pub(crate) struct Machine {
    address: String,
    pub(crate) server: Arc<Server>,
    /// Until they are let in.
    front_ends: Cell<Option<FrontEnds>>,
    /// Ends by itself once the server has stopped.
    serving: RefCell<Option<JoinHandle<()>>>,
    /// Removed when this is dropped.
    file: RefCell<Option<SocketFile>>,
    workers: Rc<Vec<Worker>>,
}

impl Machine {
    /// Binds its socket, and lets nobody in yet. `read_only` is the disk's.
    pub(crate) fn new(
        id: &str,
        (disk, cache): (&Arc<Disk>, CacheMode),
        read_only: bool,
        settings: &VhostUserBlk,
        access: &SocketAccess,
        workers: &Rc<Vec<Worker>>,
    ) -> anyhow::Result<Rc<Self>> {
        check_size(disk)?;
        let (front_ends, file) = if settings.client {
            (FrontEnds::call(id, std::path::absolute(&settings.socket)?), None)
        } else {
            let endpoint = Endpoint::Address(Address::Unix(settings.socket.clone()));
            let listeners = listen::open(&endpoint, access, &mut None)?;
            let listener = listeners.into_iter().next().ok_or_else(|| anyhow!("no socket"))?;
            (FrontEnds::listen(id, Fd::from(listener.socket)), listener.file)
        };
        let export = Export {
            id: id.into(),
            disk: Arc::clone(disk),
            offer: offer(disk, cache, read_only, settings),
            serial: settings.serial.as_deref().unwrap_or(disk.name()).into(),
        };
        Ok(Rc::new(Self {
            address: settings.address(),
            server: Server::new(export),
            front_ends: Cell::new(Some(front_ends)),
            serving: RefCell::default(),
            file: RefCell::new(file),
            workers: Rc::clone(workers),
        }))
    }

    /// Lets front ends in. Calls `broken` if that ends before it should.
    pub(crate) fn accept(&self, broken: impl FnOnce(anyhow::Error) + 'static) {
        let Some(front_ends) = self.front_ends.take() else { return };
        let threads = Threads::Workers(Rc::clone(&self.workers));
        let serving = Arc::clone(&self.server).serve(front_ends, threads);
        let address = self.address.clone();
        *self.serving.borrow_mut() = Some(reactor::spawn_joinable(async move {
            if let Err(error) = serving.await {
                broken(anyhow!("{address}: no machine can connect any more: {error} (restart weir)"));
            }
        }));
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Lets nobody in any more, removes the socket's file, and has the machine's requests end.
    pub(crate) fn close(&self) {
        self.front_ends.take();
        self.file.take();
        self.server.close();
    }

    /// Waits until the front end has gone.
    pub(crate) async fn stop(&self) {
        self.close();
        self.server.wait_while(|server| server.connections() > 0).await;
        let serving = self.serving.take();
        if let Some(serving) = serving {
            serving.cancel().await;
        }
    }
}

/// A guest counts in sectors, and would never see what lies behind the last whole one.
fn check_size(disk: &Disk) -> anyhow::Result<()> {
    let size = disk.size_bytes();
    let (whole, rest) = (size.next_multiple_of(SECTOR_BYTES), size % SECTOR_BYTES);
    ensure!(
        rest == 0,
        "disk {}: has {size} bytes, which is no multiple of {SECTOR_BYTES}, and a guest would not see the last {rest} (`weir image resize` gives an image {whole} bytes)",
        disk.name()
    );
    Ok(())
}

fn offer(disk: &Disk, cache: CacheMode, read_only: bool, settings: &VhostUserBlk) -> Offer {
    // Of the others each write is durable, whatever the guest says.
    let write_cache = !matches!(cache, CacheMode::Writethrough | CacheMode::Directsync);
    let standard = Offer::default();
    let sizes = disk.image().block_size();
    let best = sizes.preferred.clamp(standard.block_bytes, 1 << 20).next_power_of_two();
    Offer {
        size_bytes: disk.size_bytes(),
        read_only: read_only || settings.read_only || disk.image().is_read_only(),
        discard: settings.discard,
        write_zeroes: settings.write_zeroes,
        queues: settings.queues,
        queue_size: settings.queue_size,
        write_cache,
        // File systems take it for the size of a sector, and know none above a page.
        physical_block_bytes: best.min(4096),
        optimal_io_bytes: if best > 4096 { best } else { 0 },
        discard_alignment_bytes: best,
        ..standard
    }
}
