//! Groups and disks as targets of the sampler.

use policy::{
    throttle::{AdmissionCounters, Enforcement, Limits},
    watermark::Watermark,
};

use super::sampler::SamplerTarget;
use crate::{disk::Disk, layer::throttle::ThrottleGroup};

impl SamplerTarget for ThrottleGroup {
    fn name(&self) -> &str {
        self.name()
    }

    fn watermark(&self) -> Watermark {
        self.watermark()
    }

    fn limits(&self) -> Limits {
        self.limits()
    }

    fn admitted(&self) -> [AdmissionCounters; 2] {
        let stats = self.stats();
        [stats.reads, stats.writes]
    }

    fn enforce(&self, enforcement: Enforcement) {
        self.enforce(enforcement);
    }
}

/// A disk in a group has no watermark of its own here: the sampler visits its group instead.
impl SamplerTarget for Disk {
    fn name(&self) -> &str {
        self.name()
    }

    fn watermark(&self) -> Watermark {
        let member = self.throttle();
        if member.group().is_some() { Watermark::ALWAYS } else { member.watermark() }
    }

    fn limits(&self) -> Limits {
        self.throttle().limits()
    }

    fn admitted(&self) -> [AdmissionCounters; 2] {
        let stats = self.throttle().stats();
        [stats.reads, stats.writes]
    }

    fn enforce(&self, enforcement: Enforcement) {
        self.throttle().enforce(enforcement);
    }
}
