//! Disks that are added, removed and resized at run time with QEMU's commands.
//!
//! [`node`](super::node) defines how QEMU's graph of nodes becomes a disk with a name. While a node
//! is above a disk, the disk has the node's name.

use std::{cell::Cell, iter::Peekable, path::Path, rc::Rc, sync::Arc};

use block::{
    disk::Disk,
    layer::throttle::{DiskSettings, ThrottleGroup},
};
use image::{
    Image as Opened,
    open::{ImageOptions, open},
};
use policy::prefetch;
use serde_json::{Map, Value, json};
use settings::DiskConfig;
use storage::{OpenError, OpenOptions, PassedFiles, ResizeError};

use super::{
    node::{Bottom, Chain},
    weir,
};
use crate::{
    opening::PATIENCE,
    qmp::{arguments::Arguments, command::Command, error::Error, json::shown},
    registry::{NodeBelow, Refused, Registry, RunningDisk, StorageNode},
};

/// Commands that created a disk: see [`RunningDisk::told`].
type Told = Option<Vec<Map<String, Value>>>;

#[derive(Debug)]
pub(super) struct BlockdevAdd {
    chain: Chain,
    told: Told,
}

impl Command for BlockdevAdd {
    const NAME: &'static str = "blockdev-add";

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        let told = arguments.sent().map(|sent| vec![sent]);
        Ok(Self { chain: Chain::read(arguments, None)?, told })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, Error> {
        let Self { chain, told } = self;
        check_names(&registry, &chain)?;
        match &chain.bottom {
            Bottom::Node(bottom) => {
                let _turn = registry.change().await?;
                match chain.is_opened_anew() {
                    true => open_over(&registry, chain, told).await?,
                    false => put_over(&registry, &chain, bottom, told)?,
                }
            }
            Bottom::Storage(storage) => {
                // Without the lock: nothing bounds the time that a server takes.
                let opened = open_bottom(&registry, &chain, storage, None).await?;
                let _turn = registry.change().await?;
                list(&registry, &chain, storage, inner_nodes(&chain), told, opened)?;
                if let Err(why) = weir::settle(&registry).await {
                    registry.remove_disk(&chain.names[0]).await.map_err(generic)?;
                    weir::unsettle(&registry);
                    return Err(why);
                }
                if let Some(cluster) = registry.cluster() {
                    cluster.forget_moved(&chain.names[0]);
                }
            }
        }
        Ok(json!({}))
    }
}

async fn add(
    registry: &Rc<Registry>,
    chain: &Chain,
    storage: &StorageNode,
    below: Vec<NodeBelow>,
    told: Told,
    passed: Option<PassedFiles>,
) -> Result<(), Error> {
    let opened = open_bottom(registry, chain, storage, passed).await?;
    list(registry, chain, storage, below, told, opened)
}

/// Lists a disk whose image is open.
fn list(
    registry: &Rc<Registry>,
    chain: &Chain,
    storage: &StorageNode,
    below: Vec<NodeBelow>,
    told: Told,
    opened: Opened,
) -> Result<(), Error> {
    let prefetch = chain.prefetch.apply_to(prefetch::PrefetchConfig::default())?;
    // Opening awaits; other commands may have used the names in the meantime.
    check_names(registry, chain)?;
    for node in &below {
        registry.check_name(&node.name).map_err(generic)?;
    }
    let group = group_of(registry, chain)?;
    let disk = build(chain, opened, prefetch, group.as_ref())?;
    let config = DiskConfig { read_only: disk.image().is_read_only(), ..chain.config(storage) };
    let disk = RunningDisk {
        caches: Cell::new(chain.caches()),
        only_here: chain.only_here(),
        below,
        storage: chain.as_it_lies().map(Rc::new),
        told,
        ..RunningDisk::new(disk, config)
    };
    chain.policies.apply_to(disk.disk.failures());
    registry.add_disk(disk).map_err(generic)
}

/// Adds a format node over an existing node: closes the node's file and opens it with the format.
/// On failure the node is added again unchanged.
async fn open_over(registry: &Rc<Registry>, chain: Chain, own: Told) -> Result<(), Error> {
    let Bottom::Node(bottom) = &chain.bottom else { unreachable!("asked for a node alone") };
    let (bottom, below) = (bottom.clone(), find_below(registry, bottom)?);
    let is_over_another = below.below.iter().any(|node| node.stays);
    let storage = below.storage.clone().filter(|_| !is_over_another).ok_or_else(|| {
        Error::rule(
            "file",
            format_args!("must be a file; the node '{}' has a format or is a device", shown(&bottom)),
        )
    })?;
    drop(below);
    let taken = registry.take_disk(&bottom).map_err(in_use(&bottom))?;
    taken.close().await;
    let (under, told) = (taken.below, taken.told);
    // Closes the file and releases its lock, which the new image needs.
    drop(taken.disk);
    let (nodes, both) = (nodes_over(&chain, &bottom, &storage, &under), one_more(told.clone(), own));
    let added = add(registry, &chain.over(&storage), &storage, nodes, both, None).await;
    if added.is_err() {
        // The previous disk is restored even though the command fails.
        open_again(registry, &bottom, &storage, under, told).await;
    }
    added
}

/// Nodes below a format node, over a node that is closed for it and has the nodes `under` below.
fn nodes_over(chain: &Chain, bottom: &str, storage: &Rc<StorageNode>, under: &[NodeBelow]) -> Vec<NodeBelow> {
    let mut nodes = inner_nodes(chain);
    nodes.push(NodeBelow { name: bottom.to_owned(), stays: true, closed: Some(Rc::clone(storage)) });
    nodes.extend(under.iter().cloned());
    nodes
}

/// Adds a disk as these commands created it in the old process, with files that it passed. A node
/// that is closed for the node above it is not opened.
///
/// # Errors
/// The first command that would fail.
pub(in crate::qmp) async fn add_again(
    registry: &Rc<Registry>,
    told: &[Map<String, Value>],
    passed: PassedFiles,
) -> Result<(), Error> {
    let mut chains = Vec::new();
    for sent in told {
        let mut arguments = Arguments::new(sent.clone());
        // The group may have changed since; it is set afterwards.
        let name = arguments.optional("node-name")?;
        let chain = Chain { group: None, ..Chain::read(&mut arguments, name)? };
        arguments.finish()?;
        chains.push((chain, sent.clone()));
    }
    let mut chains = chains.into_iter().peekable();
    // Over a disk that was added by its keys.
    let is_over = chains.peek().is_some_and(|(first, _)| matches!(first.bottom, Bottom::Node(_)));
    if !is_over {
        add_lowest(registry, &mut chains, passed).await?;
    }
    for (chain, sent) in chains {
        let Bottom::Node(bottom) = &chain.bottom else {
            return Err(Error::rule("file", "is no node below"));
        };
        put_over(registry, &chain, bottom, Some(vec![sent]))?;
    }
    Ok(())
}

/// Takes those commands off that made the lowest node, and the one whose format it was closed for.
async fn add_lowest(
    registry: &Rc<Registry>,
    chains: &mut Peekable<impl Iterator<Item = (Chain, Map<String, Value>)>>,
    passed: PassedFiles,
) -> Result<(), Error> {
    let Some((first, sent)) = chains.next() else { return Err(Error::generic("nothing has made it")) };
    let Bottom::Storage(storage) = &first.bottom else {
        return Err(Error::rule("file", "is another disk's node"));
    };
    let (own, told) = (inner_nodes(&first), vec![sent]);
    match (chains.next_if(|(chain, _)| chain.is_opened_anew()), first.as_it_lies()) {
        (Some((over, sent)), Some(lies)) => {
            let (lies, told) = (Rc::new(lies), one_more(Some(told), Some(vec![sent])));
            let nodes = nodes_over(&over, &first.names[0], &lies, &own);
            add(registry, &over.over(&lies), &lies, nodes, told, Some(passed)).await
        }
        (None, _) => add(registry, &first, storage, own, Some(told), Some(passed)).await,
        (Some(_), None) => Err(Error::rule("file", "is more than a file")),
    }
}

/// Appends the command of the node above.
fn one_more(below: Told, own: Told) -> Told {
    below.zip(own).map(|(below, own)| [below, own].concat())
}

/// Removes the command of the topmost node.
fn one_less(mut told: Told) -> Told {
    told.as_mut().map(Vec::pop);
    told
}

/// Adds a node again that was closed for the node above it.
async fn open_again(
    registry: &Rc<Registry>,
    name: &str,
    storage: &StorageNode,
    below: Vec<NodeBelow>,
    told: Told,
) {
    if let Err(error) = add(registry, &Chain::of_storage(name, storage), storage, below, told, None).await {
        tracing::error!(node = name, error = %error, "a node could not be opened again after the node above it was removed");
    }
}

fn generic(error: impl std::fmt::Display) -> Error {
    Error::generic(error.to_string())
}

fn check_names(registry: &Registry, chain: &Chain) -> Result<(), Error> {
    for (index, name) in chain.names.iter().enumerate() {
        if registry.check_name(name).is_err() || chain.names[..index].contains(name) {
            return Err(generic(format_args!("Duplicate nodes with node-name='{name}'")));
        }
    }
    group_of(registry, chain).map(drop)
}

fn group_of(registry: &Registry, chain: &Chain) -> Result<Option<Arc<ThrottleGroup>>, Error> {
    let find = |name: &String| {
        let missing = |_| generic(format_args!("Throttle group '{}' does not exist", shown(name)));
        registry.groups.get(name).map_err(missing)
    };
    chain.group.as_ref().map(find).transpose()
}

fn inner_nodes(chain: &Chain) -> Vec<NodeBelow> {
    let node = |name: &String| NodeBelow { name: name.clone(), stays: false, closed: None };
    chain.names[1..].iter().map(node).collect()
}

fn build(
    chain: &Chain,
    image: Opened,
    prefetch: prefetch::PrefetchConfig,
    group: Option<&Arc<ThrottleGroup>>,
) -> Result<Disk, Error> {
    let disk = Disk::new(&chain.names[0], image, DiskSettings::default(), group)
        .map_err(generic)?
        .with_discards(chain.discards)
        .with_detect_zeroes(chain.detect_zeroes);
    disk.prefetch().set(prefetch).map_err(generic)?;
    disk.reserve_memory().map_err(generic)?;
    Ok(disk)
}

/// Existing topmost node.
fn find_below(registry: &Registry, name: &str) -> Result<Rc<RunningDisk>, Error> {
    registry.disks.get(name).map_err(|_| {
        let shown = shown(name);
        if registry.disks.is_below(name) {
            generic(format_args!("Node '{shown}' is in use by the disk above it"))
        } else {
            generic(format_args!("Cannot find device='{shown}' nor node-name='{shown}'"))
        }
    })
}

fn put_over(registry: &Rc<Registry>, chain: &Chain, bottom: &str, own: Told) -> Result<(), Error> {
    let name = shown(bottom);
    let below = find_below(registry, bottom)?;
    if chain.read_only && !below.disk.image().is_read_only() {
        return Err(Error::rule(
            "read-only",
            format_args!("is a setting of the node '{name}' (open it read-only)"),
        ));
    }
    let group = match (group_of(registry, chain)?, below.disk.throttle().group()) {
        // A disk is in one group only.
        (Some(_), Some(other)) => {
            let rule = format!("would be the second; the node '{name}' is in group '{}'", other.name());
            return Err(Error::rule("throttle-group", rule));
        }
        (one, other) => one.or(other),
    };
    let prefetch = chain.prefetch.apply_to(below.disk.prefetch().settings())?;
    // No await from here on: the disk is in no list until `rename`.
    drop(below);
    let taken = registry.take_disk(bottom).map_err(in_use(bottom))?;
    let taken = move_taken(registry, taken, group.as_ref())?;
    let before = taken.disk.prefetch().settings();
    taken.disk.prefetch().set(prefetch).expect("checked a moment ago");
    if let Err(error) = taken.disk.reserve_memory() {
        taken.disk.prefetch().set(before).expect("it was in force");
        registry.add_disk(taken).map_err(generic)?;
        return Err(generic(error));
    }
    chain.policies.apply_to(taken.disk.failures());
    let mut nodes = inner_nodes(chain);
    nodes.push(NodeBelow { name: bottom.to_owned(), stays: true, closed: None });
    nodes.extend(taken.below.iter().cloned());
    let told = one_more(taken.told.clone(), own);
    rename(registry, RunningDisk { told, ..taken }, &chain.names[0], nodes)
}

/// Moves a disk that was taken out to a group, or out of its group. If its reservations do not fit,
/// it is added back unchanged.
fn move_taken(
    registry: &Rc<Registry>,
    taken: RunningDisk,
    group: Option<&Arc<ThrottleGroup>>,
) -> Result<RunningDisk, Error> {
    if let Err(refused) = taken.disk.throttle().move_to(group) {
        registry.add_disk(taken).expect("its name was free a moment ago");
        return Err(refused.into());
    }
    Ok(taken)
}

/// Adds a disk that was taken out under another name.
fn rename(
    registry: &Rc<Registry>,
    taken: RunningDisk,
    name: &str,
    below: Vec<NodeBelow>,
) -> Result<(), Error> {
    let disk = Arc::into_inner(taken.disk).expect("taken when nobody else had it").renamed(name);
    registry.add_disk(RunningDisk { disk: Arc::new(disk), below, ..taken }).map_err(generic)
}

fn in_use(name: &str) -> impl Fn(Refused) -> Error {
    move |refused| match refused {
        Refused::Exported { export, .. } => {
            generic(format_args!("Node {name} is in use (it is exported as '{export}')"))
        }
        other => generic(other),
    }
}

async fn open_bottom(
    registry: &Registry,
    chain: &Chain,
    storage: &StorageNode,
    files: Option<PassedFiles>,
) -> Result<Opened, Error> {
    let StorageNode { image, device, auto_read_only, .. } = storage;
    registry.check_image(image).await.map_err(generic)?;
    let spec = image.to_spec().map_err(generic)?;
    if let (Some(path), Some(device)) = (image.path().map(Path::to_owned), *device) {
        let checked = reactor::timeout(PATIENCE, reactor::run_blocking(move || check_kind(&path, device))).await;
        checked.unwrap_or_else(|_| Err(no_answer(&spec))).map_err(Error::generic)?;
    }
    let id = chain.qcow2.as_ref().and_then(|node| node.key_secret.as_deref());
    let secret = id.map(|id| registry.objects.secret(id)).transpose()?;
    let passed = |read_only| match image.path() {
        Some(path) => registry.objects.descriptors.of_path(path, read_only).map_err(Error::generic),
        None => Ok(None),
    };
    let may_be_read_only = *auto_read_only && !chain.read_only && !chain.handover;
    let mut options = chain.open_options(registry.image_root().cloned(), secret);
    options.storage.passed_files = files;
    match passed(chain.read_only) {
        Ok(descriptor) => options.storage.descriptor = descriptor,
        Err(_) if may_be_read_only => {
            options.storage.read_only = true;
            options.storage.descriptor = passed(true)?;
        }
        Err(error) => return Err(error),
    }
    let opening = async {
        let opened = match open(&spec, options.clone()).await {
            Err(_) if may_be_read_only && !options.storage.read_only => {
                // A new descriptor: the first attempt has consumed its descriptor.
                options.storage.descriptor = None;
                let storage = OpenOptions { read_only: true, descriptor: passed(true)?, ..options.storage };
                open(&spec, ImageOptions { storage, ..options }).await
            }
            result => result,
        };
        Ok::<_, Error>(opened)
    };
    // The time limit covers files only: the timeouts of an NBD server are set by its options.
    let opened = match image.path() {
        Some(_) => reactor::timeout(PATIENCE, opening).await.unwrap_or_else(|_| {
            Err(Error::generic(format!("Could not open '{spec}': {}", no_answer(&spec))))
        })?,
        None => opening.await?,
    };
    opened.map_err(|error| {
        let OpenError { image, why, remedy, .. } = registry.naming_holder(error);
        // The path ends before the text about a file in its backing chain.
        let (image, behind) = match image.split_once(": its ") {
            Some((image, behind)) => (image, format!("its {behind}: ")),
            None => (image.as_str(), String::new()),
        };
        Error::generic(format!("Could not open '{image}': {behind}{why} ({remedy})"))
    })
}

fn no_answer(spec: &str) -> String {
    let seconds = PATIENCE.as_secs();
    format!("the file system of {spec} has not answered for {seconds} s (restore it, and add the disk again)")
}

/// Checks the type of the file: QEMU has one driver for files and one for devices.
fn check_kind(path: &Path, device: bool) -> Result<(), String> {
    use std::os::unix::fs::FileTypeExt as _;
    let Ok(kind) = std::fs::metadata(path).map(|metadata| metadata.file_type()) else { return Ok(()) };
    let path = path.display();
    match device {
        true if !kind.is_block_device() => {
            Err(format!("'host_device' driver requires '{path}' to be a block device"))
        }
        false if !kind.is_file() => Err(format!("'file' driver requires '{path}' to be a regular file")),
        _ => Ok(()),
    }
}

#[derive(Debug)]
pub(super) struct BlockdevDel {
    node: String,
}

impl Command for BlockdevDel {
    const NAME: &'static str = "blockdev-del";
    const CHANGES: bool = true;

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        Ok(Self { node: arguments.required("node-name")? })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, Error> {
        let name = shown(&self.node);
        let disk = registry.disks.get(&self.node).map_err(|_| {
            generic(if registry.disks.is_below(&self.node) {
                format!("Block device {name} is in use")
            } else {
                format!("Failed to find node with node-name='{name}'")
            })
        })?;
        let next = disk.below.iter().position(|node| node.stays);
        drop(disk);
        match next {
            None => registry.remove_disk(&self.node).await.map_err(in_use(&name))?,
            Some(next) => {
                let taken = registry.take_disk(&self.node).map_err(in_use(&name))?;
                let (node, below) = (taken.below[next].clone(), taken.below[next + 1..].to_vec());
                let told = one_less(taken.told.clone());
                match node.closed {
                    None => {
                        let taken = move_taken(&registry, taken, None)?;
                        rename(&registry, RunningDisk { told, ..taken }, &node.name, below)?;
                    }
                    Some(storage) => {
                        taken.close().await;
                        taken.until_free().await;
                        open_again(&registry, &node.name, &storage, below, told).await;
                    }
                }
            }
        }
        Ok(json!({}))
    }
}

/// Fails unless the size is a multiple of the block size of each endpoint: otherwise an export
/// could not open the disk after a restart.
fn check_blocks(registry: &Registry, disk: &Rc<RunningDisk>, size_bytes: u64) -> Result<(), Error> {
    for export in registry.exports.of_disk(disk.disk.name()) {
        let block = export.block_bytes().map_or(1, u64::from);
        if !size_bytes.is_multiple_of(block) {
            return Err(Error::rule(
                "size",
                format_args!(
                    "({size_bytes}) cannot be: export {} has blocks of {block} bytes (make it {})",
                    export.id,
                    settings::nearest_multiples(size_bytes, block)
                ),
            ));
        }
    }
    Ok(())
}

/// Unit of the sizes that `block_resize` sets: the sector of guests.
const SECTOR_BYTES: u64 = 512;

#[derive(Debug)]
pub(super) struct BlockResize {
    device: Option<String>,
    node: Option<String>,
    size_bytes: u64,
}

impl Command for BlockResize {
    const NAME: &'static str = "block_resize";

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        Ok(Self {
            device: arguments.optional("device")?,
            node: arguments.optional("node-name")?,
            size_bytes: arguments
                .number("size", 1..=i64::MAX as u64)?
                .ok_or_else(|| Error::missing("size"))?,
        })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, Error> {
        let (device, node) = (self.device.unwrap_or_default(), self.node.unwrap_or_default());
        let disk = registry.disks.get(&device).or_else(|_| registry.disks.get(&node)).map_err(|_| {
            let (device, node) = (shown(&device), shown(&node));
            generic(format_args!("Cannot find device='{device}' nor node-name='{node}'"))
        })?;
        check_blocks(&registry, &disk, self.size_bytes)?;
        if !self.size_bytes.is_multiple_of(SECTOR_BYTES) {
            let refused = ResizeError::Unaligned { multiple: SECTOR_BYTES };
            return Err(Error::rule("size", format_args!("({}) cannot be: {refused}", self.size_bytes)));
        }
        let before = disk.disk.size_bytes();
        // Listeners of the size notify all exports.
        disk.disk.resize(self.size_bytes).await.map_err(|error| match error {
            ResizeError::Unaligned { .. } | ResizeError::TooLarge { .. } => {
                Error::rule("size", format_args!("({}) cannot be: {error}", self.size_bytes))
            }
            _ if disk.disk.is_released() => generic(format_args!(
                "Cannot resize '{}': with handover its image is open only while a machine uses it, and none does (start the machine first, or resize the image itself with `weir image resize`)",
                disk.disk.name()
            )),
            error => generic(format_args!("Cannot resize '{}': {error}", disk.disk.name())),
        })?;
        tracing::info!(disk = %disk.disk.name(), before, size_bytes = self.size_bytes, "resized");
        Ok(json!({}))
    }
}
