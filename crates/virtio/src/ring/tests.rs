//! Rings together with their driver: each rule of the specification; any interleaving of both
//! sides; and a device that is killed before any of its stores.

mod cost;
mod crash;
mod rules;
mod traffic;
mod world;
