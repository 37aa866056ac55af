//! Streams under simulation: a disk whose chain of backing files becomes shorter while clients use
//! it, through errors, pauses, cancellations and crashes. The content of the disk must be the same
//! at any time, flushed data is kept, and the chain stays valid.
//!
//! - `life`: a disk through several crashes.
//! - `chain`: the images of a seed.
//! - `resize`: a disk of another size meanwhile.
//! - The clients and their model are those of the simulation of `block`.
//!
//! `WEIR_SEED=n` runs one seed, `WEIR_SEEDS=n` the first n. A failure prints the command that
//! repeats it.

mod chain;
#[expect(dead_code, reason = "shared with the simulation of block")]
#[path = "../../../block/tests/simulation/client.rs"]
mod client;
#[expect(dead_code, reason = "shared with the simulation of block")]
#[path = "../../../block/tests/simulation/group_samples.rs"]
mod group_samples;
#[path = "../../../block/tests/simulation/guest.rs"]
mod guest;
mod life;
#[path = "../../../block/tests/simulation/model.rs"]
mod model;
#[expect(dead_code, reason = "shared with the simulation of block")]
#[path = "../../../block/tests/simulation/references.rs"]
mod references;
mod resize;
#[path = "../../../block/tests/simulation/seeds.rs"]
mod seeds;
