//! Throttling in virtual time: one file a subject, all of them on the same [`timeline::Timeline`].
//!
//! Nothing here sleeps or reads a clock, so every number is exact.

mod accuracy;
mod booking;
mod bursts;
mod changes;
mod every_order;
mod fairness;
mod groups;
mod moves;
mod naive;
mod nesting;
mod observed;
mod parts;
mod properties;
mod queueing;
mod sequences;
mod shares;
mod slices;
mod spare;
mod takeover;
mod timeline;
