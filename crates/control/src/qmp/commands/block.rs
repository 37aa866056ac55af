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
    node::{ChainBottom, NodeChain},
    set,
};
use crate::{
    image_opening::OPEN_TIMEOUT,
    qmp::{arguments::QmpArguments, command::QmpCommand, error::QmpError, json::excerpt},
    registry::{LowerNode, ProtocolNode, Registry, RegistryError, RunningDisk},
};

/// Commands that created a disk: see [`RunningDisk::creation_commands`].
type CreationCommands = Option<Vec<Map<String, Value>>>;

#[derive(Debug)]
pub(super) struct BlockdevAdd {
    chain: NodeChain,
    creation_commands: CreationCommands,
}

impl QmpCommand for BlockdevAdd {
    const NAME: &'static str = "blockdev-add";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let commands = arguments.sent_json().map(|sent| vec![sent]);
        Ok(Self { chain: NodeChain::read(arguments, None)?, creation_commands: commands })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let Self { chain, creation_commands: commands } = self;
        check_names(&registry, &chain)?;
        match &chain.bottom {
            ChainBottom::Node(bottom) => {
                let _guard = registry.lock_structure().await?;
                match chain.reopens_node() {
                    true => reopen_with_format(&registry, chain, commands).await?,
                    false => add_node_over(&registry, &chain, bottom, commands)?,
                }
            }
            ChainBottom::Storage(storage) => {
                // Without the lock: the answer of a storage server may take any time.
                let opened = open_storage(&registry, &chain, storage, None).await?;
                let _guard = registry.lock_structure().await?;
                list(&registry, &chain, storage, inner_nodes(&chain), commands, opened)?;
                if let Err(why) = set::publish_reservations(&registry).await {
                    registry.remove_disk(&chain.names[0]).await.map_err(generic_error)?;
                    set::publish_rolled_back(&registry).await;
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

async fn add_disk(
    registry: &Rc<Registry>,
    chain: &NodeChain,
    storage: &ProtocolNode,
    below: Vec<LowerNode>,
    commands: CreationCommands,
    passed: Option<PassedFiles>,
) -> Result<(), QmpError> {
    let opened = open_storage(registry, chain, storage, passed).await?;
    list(registry, chain, storage, below, commands, opened)
}

/// Lists a disk whose image is open.
fn list(
    registry: &Rc<Registry>,
    chain: &NodeChain,
    storage: &ProtocolNode,
    below: Vec<LowerNode>,
    commands: CreationCommands,
    opened: Opened,
) -> Result<(), QmpError> {
    let prefetch = chain.prefetch.apply_to(prefetch::PrefetchConfig::default())?;
    // Opening awaits; other commands may have used the names in the meantime.
    check_names(registry, chain)?;
    for node in &below {
        registry.check_name(&node.name).map_err(generic_error)?;
    }
    let group = group_of(registry, chain)?;
    let disk = build_disk(chain, opened, prefetch, group.as_ref())?;
    let config = DiskConfig { read_only: disk.image().is_read_only(), ..chain.config(storage) };
    let disk = RunningDisk {
        caches: Cell::new(chain.caches()),
        host_local_option: chain.host_local_option(),
        lower_nodes: below,
        storage: chain.plain_storage().map(Rc::new),
        creation_commands: commands,
        ..RunningDisk::new(disk, config)
    };
    chain.policies.apply_to(disk.disk.failures());
    registry.add_disk(disk).map_err(generic_error)
}

/// Adds a format node over an existing node: closes the node's file and opens it with the format.
/// On failure the node is added again unchanged.
async fn reopen_with_format(
    registry: &Rc<Registry>,
    chain: NodeChain,
    own_commands: CreationCommands,
) -> Result<(), QmpError> {
    let ChainBottom::Node(bottom) = &chain.bottom else { unreachable!("asked for a node alone") };
    let (bottom, below) = (bottom.clone(), find_top_node(registry, bottom)?);
    // After a snapshot the node's own file is a backing file, which must not be opened for writing.
    let is_over_another = below.is_switched() || below.lower_nodes.iter().any(|node| node.is_own_disk);
    let storage = below.storage.clone().filter(|_| !is_over_another).ok_or_else(|| {
        QmpError::rule(
            "file",
            format_args!("must be a file; the node '{}' has a format or is a device", excerpt(&bottom)),
        )
    })?;
    drop(below);
    let taken = registry.take_out_disk(&bottom).map_err(in_use_error(&bottom))?;
    taken.close().await;
    let (lower_nodes, commands) = (taken.lower_nodes, taken.creation_commands);
    // Closes the file and releases its lock, which the new image needs.
    drop(taken.disk);
    let (nodes, all_commands) = (
        nodes_below_format(&chain, &bottom, &storage, &lower_nodes),
        with_command(commands.clone(), own_commands),
    );
    let added = add_disk(registry, &chain.over_storage(&storage), &storage, nodes, all_commands, None).await;
    if added.is_err() {
        // The previous disk is restored even though the command fails.
        restore_node(registry, &bottom, &storage, lower_nodes, commands).await;
    }
    added
}

/// Nodes below a format node that is added over the node `bottom`, which is reopened for it.
fn nodes_below_format(
    chain: &NodeChain,
    bottom: &str,
    storage: &Rc<ProtocolNode>,
    under: &[LowerNode],
) -> Vec<LowerNode> {
    let mut nodes = inner_nodes(chain);
    nodes.push(LowerNode {
        name: bottom.to_owned(),
        is_own_disk: true,
        reopen_options: Some(Rc::clone(storage)),
    });
    nodes.extend(under.iter().cloned());
    nodes
}

/// Adds a disk as these commands created it in the old process, with files that it passed. A node
/// that is closed for the node above it is not opened.
///
/// # Errors
/// The first command that would fail.
pub(in crate::qmp) async fn add_transferred(
    registry: &Rc<Registry>,
    commands: &[Map<String, Value>],
    passed: PassedFiles,
) -> Result<(), QmpError> {
    let mut chains = Vec::new();
    for sent in commands {
        let mut arguments = QmpArguments::new(sent.clone());
        // The group may have changed since; it is set afterwards.
        let name = arguments.optional("node-name")?;
        let chain = NodeChain { group: None, ..NodeChain::read(&mut arguments, name)? };
        arguments.finish()?;
        chains.push((chain, sent.clone()));
    }
    let mut chains = chains.into_iter().peekable();
    // True if the lowest node exists already: it was added by keys, so no command created it.
    let lowest_exists = chains.peek().is_some_and(|(first, _)| matches!(first.bottom, ChainBottom::Node(_)));
    if !lowest_exists {
        add_lowest_node(registry, &mut chains, passed).await?;
    }
    for (chain, sent) in chains {
        let ChainBottom::Node(bottom) = &chain.bottom else {
            return Err(QmpError::rule("file", "names no node below"));
        };
        add_node_over(registry, &chain, bottom, Some(vec![sent]))?;
    }
    Ok(())
}

/// Adds the lowest node. Consumes the command that created it, and the next one if that reopened
/// the node with a format.
async fn add_lowest_node(
    registry: &Rc<Registry>,
    chains: &mut Peekable<impl Iterator<Item = (NodeChain, Map<String, Value>)>>,
    passed: PassedFiles,
) -> Result<(), QmpError> {
    let Some((first, sent)) = chains.next() else {
        return Err(QmpError::generic("the command that created it is missing"));
    };
    let ChainBottom::Storage(storage) = &first.bottom else {
        return Err(QmpError::rule("file", "names the node of another disk"));
    };
    let (lower_nodes, commands) = (inner_nodes(&first), vec![sent]);
    match (chains.next_if(|(chain, _)| chain.reopens_node()), first.plain_storage()) {
        (Some((over, sent)), Some(file_storage)) => {
            let (file_storage, commands) =
                (Rc::new(file_storage), with_command(Some(commands), Some(vec![sent])));
            let nodes = nodes_below_format(&over, &first.names[0], &file_storage, &lower_nodes);
            add_disk(
                registry,
                &over.over_storage(&file_storage),
                &file_storage,
                nodes,
                commands,
                Some(passed),
            )
            .await
        }
        (None, _) => add_disk(registry, &first, storage, lower_nodes, Some(commands), Some(passed)).await,
        (Some(_), None) => Err(QmpError::rule("file", "names more than a file")),
    }
}

/// Appends the command of the node above.
fn with_command(below: CreationCommands, added: CreationCommands) -> CreationCommands {
    below.zip(added).map(|(below, added)| [below, added].concat())
}

/// Removes the command of the topmost node.
fn without_last_command(mut commands: CreationCommands) -> CreationCommands {
    commands.as_mut().map(Vec::pop);
    commands
}

/// Adds a node again that was closed for the node above it.
async fn restore_node(
    registry: &Rc<Registry>,
    name: &str,
    storage: &ProtocolNode,
    below: Vec<LowerNode>,
    commands: CreationCommands,
) {
    if let Err(error) =
        add_disk(registry, &NodeChain::of_storage(name, storage), storage, below, commands, None).await
    {
        tracing::error!(
            node = name, error = %error,
            "a node could not be opened again after the node above it was removed"
        );
    }
}

fn generic_error(error: impl std::fmt::Display) -> QmpError {
    QmpError::generic(error.to_string())
}

fn check_names(registry: &Registry, chain: &NodeChain) -> Result<(), QmpError> {
    for (index, name) in chain.names.iter().enumerate() {
        if registry.check_name(name).is_err() || chain.names[..index].contains(name) {
            return Err(generic_error(format_args!("Duplicate nodes with node-name='{name}'")));
        }
    }
    group_of(registry, chain).map(drop)
}

fn group_of(registry: &Registry, chain: &NodeChain) -> Result<Option<Arc<ThrottleGroup>>, QmpError> {
    let find = |name: &String| {
        let missing = |_| generic_error(format_args!("Throttle group '{}' does not exist", excerpt(name)));
        registry.groups.get(name).map_err(missing)
    };
    chain.group.as_ref().map(find).transpose()
}

fn inner_nodes(chain: &NodeChain) -> Vec<LowerNode> {
    let node = |name: &String| LowerNode { name: name.clone(), is_own_disk: false, reopen_options: None };
    chain.names[1..].iter().map(node).collect()
}

fn build_disk(
    chain: &NodeChain,
    image: Opened,
    prefetch: prefetch::PrefetchConfig,
    group: Option<&Arc<ThrottleGroup>>,
) -> Result<Disk, QmpError> {
    let disk = Disk::new(&chain.names[0], image, DiskSettings::default(), group)
        .map_err(generic_error)?
        .with_discards(chain.discards)
        .with_detect_zeroes(chain.detect_zeroes);
    disk.prefetch().set(prefetch).map_err(generic_error)?;
    disk.reserve_memory().map_err(generic_error)?;
    Ok(disk)
}

/// The disk that a client names by its own name or by that of a node that a snapshot or mirror has
/// put over it.
pub(super) fn find_device(registry: &Registry, name: &str) -> Result<Rc<RunningDisk>, QmpError> {
    registry.disks.find_node(name).ok_or_else(|| {
        let shown = excerpt(name);
        QmpError::generic(format!("Cannot find device='{shown}' nor node-name='{shown}'"))
    })
}

/// Name of this disk.
pub(super) fn find_device_name(registry: &Registry, name: &str) -> Result<String, QmpError> {
    Ok(find_device(registry, name)?.disk.name().to_string())
}

/// Existing topmost node.
fn find_top_node(registry: &Registry, name: &str) -> Result<Rc<RunningDisk>, QmpError> {
    registry.disks.get(name).map_err(|_| {
        let shown = excerpt(name);
        if registry.disks.has_node_name(name) {
            generic_error(format_args!("Node '{shown}' is in use by the disk above it"))
        } else {
            generic_error(format_args!("Cannot find device='{shown}' nor node-name='{shown}'"))
        }
    })
}

fn add_node_over(
    registry: &Rc<Registry>,
    chain: &NodeChain,
    bottom: &str,
    own_commands: CreationCommands,
) -> Result<(), QmpError> {
    let name = excerpt(bottom);
    let below = find_top_node(registry, bottom)?;
    if chain.read_only && !below.disk.image().is_read_only() {
        return Err(QmpError::rule(
            "read-only",
            format_args!("is a setting of the node '{name}' (open it read-only)"),
        ));
    }
    let group = match (group_of(registry, chain)?, below.disk.throttle().group()) {
        // A disk is in one group only.
        (Some(_), Some(other)) => {
            let rule = format!("would be the second; the node '{name}' is in group '{}'", other.name());
            return Err(QmpError::rule("throttle-group", rule));
        }
        (one, other) => one.or(other),
    };
    let prefetch = chain.prefetch.apply_to(below.disk.prefetch().settings())?;
    // No await from here on: the disk is in no list until `list_renamed`.
    drop(below);
    let taken = registry.take_out_disk(bottom).map_err(in_use_error(bottom))?;
    let taken = move_to_group(registry, taken, group.as_ref())?;
    let before = taken.disk.prefetch().settings();
    taken.disk.prefetch().set(prefetch).expect("checked a moment ago");
    if let Err(error) = taken.disk.reserve_memory() {
        taken.disk.prefetch().set(before).expect("it was in force");
        registry.add_disk(taken).map_err(generic_error)?;
        return Err(generic_error(error));
    }
    chain.policies.apply_to(taken.disk.failures());
    let mut nodes = inner_nodes(chain);
    nodes.push(LowerNode { name: bottom.to_owned(), is_own_disk: true, reopen_options: None });
    nodes.extend(taken.lower_nodes.iter().cloned());
    let commands = with_command(taken.creation_commands.clone(), own_commands);
    list_renamed(registry, RunningDisk { creation_commands: commands, ..taken }, &chain.names[0], nodes)
}

/// Moves a disk that was taken out to a group, or out of its group. If its reservations do not fit,
/// it is added back unchanged.
fn move_to_group(
    registry: &Rc<Registry>,
    taken: RunningDisk,
    group: Option<&Arc<ThrottleGroup>>,
) -> Result<RunningDisk, QmpError> {
    if let Err(refused) = taken.disk.throttle().move_to(group) {
        registry.add_disk(taken).expect("its name was free a moment ago");
        return Err(refused.into());
    }
    Ok(taken)
}

/// Adds a disk that was taken out under another name.
fn list_renamed(
    registry: &Rc<Registry>,
    taken: RunningDisk,
    name: &str,
    below: Vec<LowerNode>,
) -> Result<(), QmpError> {
    let disk = Arc::into_inner(taken.disk).expect("this is the only reference").renamed(name);
    registry
        .add_disk(RunningDisk { disk: Arc::new(disk), lower_nodes: below, ..taken })
        .map_err(generic_error)
}

fn in_use_error(name: &str) -> impl Fn(RegistryError) -> QmpError {
    move |refused| match refused {
        RegistryError::Exported { export, .. } => {
            generic_error(format_args!("Node {name} is in use (it is exported as '{export}')"))
        }
        other => generic_error(other),
    }
}

async fn open_storage(
    registry: &Registry,
    chain: &NodeChain,
    storage: &ProtocolNode,
    files: Option<PassedFiles>,
) -> Result<Opened, QmpError> {
    let ProtocolNode { image, device, auto_read_only, .. } = storage;
    registry.check_image(image).await.map_err(generic_error)?;
    let spec = image.to_spec().map_err(generic_error)?;
    if let (Some(path), Some(device)) = (image.path().map(Path::to_owned), *device) {
        let checked =
            reactor::timeout(OPEN_TIMEOUT, reactor::run_blocking(move || check_file_type(&path, device)))
                .await;
        checked.unwrap_or_else(|_| Err(unresponsive_text(&spec))).map_err(QmpError::generic)?;
    }
    let id = chain.qcow2.as_ref().and_then(|node| node.key_secret.as_deref());
    let secret = id.map(|id| registry.objects.secret(id)).transpose()?;
    let passed = |read_only| match image.path() {
        Some(path) => registry.objects.descriptors.descriptor_at(path, read_only).map_err(QmpError::generic),
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
        Ok::<_, QmpError>(opened)
    };
    // The time limit covers files only: the timeouts of an NBD server are set by its options.
    let opened = match image.path() {
        Some(_) => reactor::timeout(OPEN_TIMEOUT, opening).await.unwrap_or_else(|_| {
            Err(QmpError::generic(format!("Could not open '{spec}': {}", unresponsive_text(&spec))))
        })?,
        None => opening.await?,
    };
    opened.map_err(|error| {
        let OpenError { image, why, remedy, .. } = registry.with_holder(error);
        // The path ends before the text about a file in its backing chain.
        let (image, chain_part) = match image.split_once(": its ") {
            Some((image, chain_part)) => (image, format!("its {chain_part}: ")),
            None => (image.as_str(), String::new()),
        };
        QmpError::generic(format!("Could not open '{image}': {chain_part}{why} ({remedy})"))
    })
}

fn unresponsive_text(spec: &str) -> String {
    let seconds = OPEN_TIMEOUT.as_secs();
    format!("the file system of {spec} has not answered for {seconds} s (restore it, and add the disk again)")
}

/// Checks the type of the file: QEMU has one driver for files and one for devices.
fn check_file_type(path: &Path, device: bool) -> Result<(), String> {
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

/// Closes a disk whose topmost node is deleted. The nodes below it, which QEMU would keep, remain
/// as names until a client deletes them.
async fn delete_top_node(registry: &Registry, disk: Rc<RunningDisk>) -> Result<Value, QmpError> {
    let name = disk.disk.name().to_string();
    let mut below = disk.overlay_nodes();
    let top = below.pop().unwrap_or_default();
    below.extend(disk.lower_nodes.iter().map(|node| node.name.clone()));
    below.push(name.clone());
    drop(disk);
    registry.remove_disk(&name).await.map_err(in_use_error(&excerpt(&top)))?;
    registry.disks.keep_closed_nodes(below);
    Ok(json!({}))
}

#[derive(Debug)]
pub(super) struct BlockdevDel {
    node: String,
}

impl QmpCommand for BlockdevDel {
    const NAME: &'static str = "blockdev-del";
    const CHANGES_STRUCTURE: bool = true;

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(Self { node: arguments.required("node-name")? })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let name = excerpt(&self.node);
        if registry.disks.delete_closed_node(&self.node) {
            return Ok(json!({}));
        }
        if let Some(disk) = registry.disks.find_node(&self.node)
            && disk.overlay_nodes().last() == Some(&self.node)
        {
            return delete_top_node(&registry, disk).await;
        }
        let disk = registry.disks.get(&self.node).map_err(|_| {
            generic_error(if registry.disks.has_node_name(&self.node) {
                format!("Block device {name} is in use")
            } else {
                format!("Failed to find node with node-name='{name}'")
            })
        })?;
        let next = disk.lower_nodes.iter().position(|node| node.is_own_disk);
        // The node below would be opened for writing, although the overlay needs it unchanged.
        if disk.is_switched() && (next.is_some() || !disk.overlay_nodes().is_empty()) {
            let overlay = excerpt(&disk.config().image.to_string());
            return Err(generic_error(format!(
                "Block device {name} is in use: the disk continues on {overlay} (delete the topmost node \
                 first, or remove all with x-weir-remove-disk)"
            )));
        }
        drop(disk);
        match next {
            None => registry.remove_disk(&self.node).await.map_err(in_use_error(&name))?,
            Some(next) => {
                let taken = registry.take_out_disk(&self.node).map_err(in_use_error(&name))?;
                let (node, below) = (taken.lower_nodes[next].clone(), taken.lower_nodes[next + 1..].to_vec());
                let commands = without_last_command(taken.creation_commands.clone());
                match node.reopen_options {
                    None => {
                        let taken = move_to_group(&registry, taken, None)?;
                        list_renamed(
                            &registry,
                            RunningDisk { creation_commands: commands, ..taken },
                            &node.name,
                            below,
                        )?;
                    }
                    Some(storage) => {
                        taken.close().await;
                        taken.wait_until_free().await;
                        restore_node(&registry, &node.name, &storage, below, commands).await;
                    }
                }
            }
        }
        Ok(json!({}))
    }
}

/// Fails unless the size is a multiple of the block size of each endpoint: otherwise an export
/// could not open the disk after a restart.
fn check_block_sizes(registry: &Registry, disk: &Rc<RunningDisk>, size_bytes: u64) -> Result<(), QmpError> {
    for export in registry.exports.of_disk(disk.disk.name()) {
        let block = export.block_bytes().map_or(1, u64::from);
        if !size_bytes.is_multiple_of(block) {
            return Err(QmpError::rule(
                "size",
                format_args!(
                    "({size_bytes}) is not possible: export {} has blocks of {block} bytes (make it {})",
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

impl QmpCommand for BlockResize {
    const NAME: &'static str = "block_resize";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(Self {
            device: arguments.optional("device")?,
            node: arguments.optional("node-name")?,
            size_bytes: arguments
                .number("size", 1..=i64::MAX as u64)?
                .ok_or_else(|| QmpError::missing("size"))?,
        })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let (device, node) = (self.device.unwrap_or_default(), self.node.unwrap_or_default());
        let disks = &registry.disks;
        let disk = disks.find_node(&device).or_else(|| disks.find_node(&node)).ok_or_else(|| {
            let (device, node) = (excerpt(&device), excerpt(&node));
            generic_error(format_args!("Cannot find device='{device}' nor node-name='{node}'"))
        })?;
        check_block_sizes(&registry, &disk, self.size_bytes)?;
        if !self.size_bytes.is_multiple_of(SECTOR_BYTES) {
            let refused = ResizeError::Unaligned { multiple: SECTOR_BYTES };
            return Err(QmpError::rule(
                "size",
                format_args!("({}) is not possible: {refused}", self.size_bytes),
            ));
        }
        let before = disk.disk.size_bytes();
        // Listeners of the size notify all exports.
        disk.disk.resize(self.size_bytes).await.map_err(|error| match error {
            ResizeError::Unaligned { .. } | ResizeError::TooLarge { .. } => {
                QmpError::rule("size", format_args!("({}) is not possible: {error}", self.size_bytes))
            }
            _ if disk.disk.is_released() => generic_error(format_args!(
                "Cannot resize '{}': with handover its image is open only while a virtual machine \
                 runs on it (start the virtual machine first, or resize the image itself with \
                 `weir image resize`)",
                disk.disk.name()
            )),
            error => generic_error(format_args!("Cannot resize '{}': {error}", disk.disk.name())),
        })?;
        tracing::info!(disk = %disk.disk.name(), before, size_bytes = self.size_bytes, "resized");
        Ok(json!({}))
    }
}
