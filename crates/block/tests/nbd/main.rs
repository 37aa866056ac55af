//! The NBD codec against real clients, and its TLS against OpenSSL's, over the smallest server that can drive it.
//!
//! The server here has a thread a connection and a `Vec` for a disk: it exists to show that the codec alone is
//! right, and how it is driven. The clients are libnbd's and QEMU's (Debian: libnbd-bin, qemu-utils); a missing one
//! fails the test with its package's name.

mod certificates;
mod clients;
mod server;
mod tls_clients;
mod tls_memory;
