//! Jobs under simulation: guests write, zero, discard, flush and resize a disk while a job of it
//! runs, is paused or is cancelled; source and target fail requests. A completed backup must equal
//! the disk at its instant, a disk that a mirror has moved must equal itself before, and the guests
//! must read what they wrote.
//!
//! - `backups`: the operations above during a backup, with raw and qcow2 images, and limits.
//! - `chains`: full and incremental backups, restored after each; the bitmap after a crash.
//! - `mirrors`: the same during a mirror, which is completed; and crashes after that.
//! - `guest`: a guest, and the model of what its disk may contain.
//! - `world`: the images of a seed.
//! - `rates`: a backup uses spare capacity, its weight, or its limits; pauses, and targets that do
//!   not answer.
//!
//! `WEIR_SEED=n` runs one seed, `WEIR_SEEDS=n` the first n. A failure prints the command that
//! repeats it.

mod backups;
mod chains;
mod guest;
mod mirrors;
mod rates;
#[path = "../../../block/tests/simulation/seeds.rs"]
mod seeds;
mod world;
