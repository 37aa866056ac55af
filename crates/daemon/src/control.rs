//! What runs, and how it is changed while it runs.
//!
//! ```text
//!   serve ─────────► Inventory ◄───────── control socket
//!   starts and ends     │ by name: disks, groups, servers, exports
//!                       ▼
//!                  the parts of the data path
//! ```
//!
//! There is one list of what runs, the [`Inventory`](inventory::Inventory). It belongs to the main
//! thread; the data path has no need of it.

mod around_cluster;
pub(crate) mod assemble;
pub(crate) mod bitmaps;
pub(crate) mod change;
mod coming_up;
pub(crate) mod devices;
pub(crate) mod doors;
pub(crate) mod exports;
pub(crate) mod fdsets;
mod held_back;
pub(crate) mod inventory;
mod left_out;
pub(crate) mod loaded;
pub(crate) mod looking;
pub(crate) mod moving;
pub(crate) mod opening;
mod promises;
pub(crate) mod qmp;
pub(crate) mod recording;
pub(crate) mod reload;
pub(crate) mod running;
pub(crate) mod serving;
pub(crate) mod takeover;
mod turns;
mod unopened;
pub(crate) mod wanted;
pub(crate) mod watch;
