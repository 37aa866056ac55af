//! Requests of a generated workload; the same seed gives the same requests.

use recording::{DiskId, RecordSource, TraceRecord};
use simulator::request::RequestOp;

use super::workload::{OpenWorkload, names};
use crate::load::{RandomBlocks, exponential};

#[derive(Debug)]
pub(crate) struct WorkloadGenerator {
    open: OpenWorkload,
    names: Vec<String>,
    random: fastrand::Rng,
    draw: RandomBlocks,
    /// Time of the last request in nanoseconds, and the number of requests.
    at: f64,
    count: u64,
}

impl WorkloadGenerator {
    pub(crate) fn new(open: &OpenWorkload, seed: u64) -> Self {
        Self {
            names: names(open.disks),
            random: fastrand::Rng::with_seed(seed),
            draw: RandomBlocks::new(open.span / open.length, open.locality, seed),
            at: 0.0,
            count: 0,
            open: open.clone(),
        }
    }
}

impl RecordSource for WorkloadGenerator {
    fn fill(&mut self, records: &mut Vec<TraceRecord>, count: usize) -> anyhow::Result<()> {
        let OpenWorkload { iops, length, disks, seconds, read, .. } = self.open;
        // A superposition of Poisson processes (Kingman, *Poisson Processes*, 1993, section 2.2).
        let mean_ns = 1e9 / (iops as f64 * disks as f64);
        for _ in 0..count {
            // A float: rounding each gap to nanoseconds would distort high rates.
            self.at += exponential(mean_ns, &mut self.random);
            if self.at >= seconds as f64 * 1e9 {
                break;
            }
            self.count += 1;
            let offset = self.draw.block(&mut self.random) * length;
            records.push(TraceRecord {
                time_ns: self.at as u64,
                offset,
                length,
                line: self.count,
                disk: DiskId(self.random.usize(0..disks) as u32),
                file: 0,
                op: if self.random.u64(0..100) < read { RequestOp::Read } else { RequestOp::Write },
            });
        }
        Ok(())
    }

    fn disks(&self) -> &[String] {
        &self.names
    }

    fn place(&self, record: &TraceRecord) -> String {
        format!("the workload's request {}", record.line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::Workload;

    fn generated(text: &str, seed: u64) -> Vec<TraceRecord> {
        let Workload::Open(open) = text.parse().unwrap() else { panic!("{text} is not open") };
        let mut generator = WorkloadGenerator::new(&open, seed);
        let mut records = Vec::new();
        generator.fill(&mut records, usize::MAX).unwrap();
        records
    }

    #[test]
    fn same_seed_generates_the_same_requests() {
        let text = "random:iops=5000,size=4K,disks=4,seconds=2,read=70";
        let records = generated(text, 7);
        assert_eq!(records, generated(text, 7));
        assert_ne!(records, generated(text, 8));
        let near = |value: usize, expected: f64| {
            assert!((value as f64 / expected - 1.0).abs() < 0.03, "{value} instead of {expected}");
        };
        near(records.len(), 40_000.0);
        near(records.iter().filter(|record| record.op == RequestOp::Read).count(), 28_000.0);
        near(records.iter().filter(|record| record.disk == DiskId(3)).count(), 10_000.0);
        near(records.iter().filter(|record| record.time_ns < 1_000_000_000).count(), 20_000.0);
        assert!(records.is_sorted_by_key(|record| record.time_ns));
        assert!(
            records
                .iter()
                .all(|record| record.offset + record.length <= 1 << 30 && record.offset.is_multiple_of(4096))
        );
    }

    #[test]
    fn hot_blocks_get_their_share() {
        let records = generated("hot-cold:iops=10000,seconds=2,requests=90,space=10,span=1M", 1);
        let hot = records.iter().filter(|record| record.offset < (1 << 20) / 10).count();
        assert!((hot as f64 / records.len() as f64 - 0.9).abs() < 0.01, "{hot} of {}", records.len());
    }
}
