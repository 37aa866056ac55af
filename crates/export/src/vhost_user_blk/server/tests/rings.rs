//! Requests of rings whose disk is stopped, whose guest breaks the protocol, or whose front end
//! disconnects.

use super::*;

#[test]
fn large_request_interrupted_by_close_is_not_completed() {
    real(async {
        let mut limits = Limits::default();
        *limits.limit_mut(LimitKind::BpsTotal) =
            RateLimit { rate: 1, burst_rate: 6000, burst_length_s: 1, ..RateLimit::NONE };
        let server = server(limits);
        let front_end = SocketFrontEnd::connect(&server).await;
        let mut ring = front_end.start(0, event(0), event(0)).await;
        let memory = front_end.memory.clone();
        let buffer = memory.range(REQUESTS, 0x1000).expect("inside");
        buffer.write(0, &1_u32.to_le_bytes());
        buffer.write(8, &[0; 8]);
        buffer.write(1024, &[GUARD]);
        let piece = |at, bytes, writable| Piece { address: REQUESTS + at, bytes, writable };
        let pieces = [piece(0, 16, false), piece(0x1000, 0x4000, false), piece(1024, 1, true)];
        ring.driver.add(&pieces).expect("there is room");
        ring.kick();
        // Some pieces are admitted; the rest would wait for hours.
        while server.device.disk().totals().written_bytes == 0 {
            reactor::yield_now().await;
        }
        server.close();
        front_end.served.await;
        // Neither completed nor failed: it stays in the in-flight area, if the front end has one.
        let mut status = [0];
        buffer.read(1024, &mut status);
        assert_eq!(status, [GUARD]);
        assert!(ring.driver.next_used().expect("a good device").is_none(), "nothing came back");
        let statistics = server.statistics();
        assert_eq!((statistics.queues, statistics.in_flight, statistics.requests), (0, 0, 1));
    });
}

#[test]
fn requests_held_by_a_stopped_disk_go_back_into_the_ring() {
    real(async {
        let failing = "kind=write,error=ENOSPC,count=3".parse().expect("a rule");
        let server = server_over(Storage::memory(1 << 20).with_faults(vec![failing]), Limits::default());
        let disk = server.device.disk();
        disk.failures().set_policies(ErrorPolicies { write: OnError::Stop, ..ErrorPolicies::default() });
        let mut front_end = SocketFrontEnd::connect(&server).await;
        let mut ring = front_end.start(0, event(0), event(0)).await;
        let mut requests = Vec::new();
        for number in 0..3 {
            requests.push(front_end.request(&mut ring, 1, number * 100, &[number as u8 + 1; 512]));
            ring.kick();
        }
        while disk.failures().stopped_by().is_none() || server.statistics().requests < 3 {
            reactor::yield_now().await;
        }
        // The front end of a machine that is paused or migrated requests its ring's base and waits
        // for the reply.
        assert_eq!(front_end.stop(0).await, 0, "all went back");
        assert_eq!(server.statistics().in_flight, 0);
        assert!(requests.iter().all(|at| front_end.data(*at).1 == GUARD), "none was answered");
        // The machine resumes, and so does the disk.
        front_end.set_event(code::SET_VRING_KICK, 0, &event(1)).await;
        while server.statistics().requests < 6 {
            reactor::yield_now().await;
        }
        while requests.iter().any(|at| front_end.data(*at).1 == GUARD) {
            disk.failures().resume();
            reactor::yield_now().await;
        }
        assert!(requests.iter().all(|at| front_end.data(*at).1 == 0), "each was done");
        front_end.leave().await;
    });
}

#[test]
fn requests_that_cannot_go_back_wait_for_the_disk() {
    real(async {
        let failing = "kind=write,error=ENOSPC,count=1".parse().expect("a rule");
        let server = server_over(Storage::memory(1 << 20).with_faults(vec![failing]), Limits::default());
        let disk = server.device.disk();
        disk.failures().set_policies(ErrorPolicies { write: OnError::Stop, ..ErrorPolicies::default() });
        let mut front_end = SocketFrontEnd::connect(&server).await;
        let mut ring = front_end.start(0, event(0), event(0)).await;
        let write = front_end.request(&mut ring, 1, 0, &[1; 512]);
        ring.kick();
        while disk.failures().stopped_by().is_none() {
            reactor::yield_now().await;
        }
        // GET_ID needs no disk, and completes before the earlier write.
        let id = front_end.request(&mut ring, 8, 0, &[0; 512]);
        ring.kick();
        while front_end.data(id).1 == GUARD {
            reactor::yield_now().await;
        }
        front_end.send(code::GET_VRING_BASE, 1, &[0; 8], &[]);
        let early = timeout(Duration::from_millis(50), front_end.receive(1)).await;
        assert!(early.is_err() && front_end.data(write).1 == GUARD, "it is neither done nor failed");
        disk.failures().resume();
        let base = front_end.receive_reply(code::GET_VRING_BASE).await;
        assert_eq!(base, [0, 2].map(u32::to_ne_bytes).concat());
        assert_eq!(front_end.data(write).1, 0, "it was done");
        front_end.leave().await;
    });
}

#[test]
fn disconnect_does_not_wait_for_limits() {
    real(async {
        let server = server(one_request_per_second(LimitKind::IopsTotal));
        let mut front_end = SocketFrontEnd::connect(&server).await;
        let mut ring = front_end.start(0, event(0), event(0)).await;
        // Not adjacent, so that each request waits on its own.
        let requests: Vec<_> =
            (0..10).map(|number| front_end.request(&mut ring, 1, number * 100, &[1; 512])).collect();
        ring.kick_and_wait().await;
        assert_eq!(front_end.data(requests[0]).1, 0);
        assert_eq!(server.statistics().requests, 10, "all were taken");
        let memory = front_end.memory.clone();
        front_end.leave().await;
        let waiting = requests.iter().filter(|at| {
            let mut status = [0];
            memory.range(**at + 1024, 1).expect("inside").read(0, &mut status);
            status == [GUARD]
        });
        assert!(waiting.count() > 5, "requests completed without a front end");
        let statistics = server.statistics();
        assert_eq!((statistics.queues, statistics.in_flight), (0, 0));
    });
}

#[test]
fn ring_without_a_valid_kick_is_polled() {
    real(async {
        let server = server(Limits::default());
        let mut front_end = SocketFrontEnd::connect(&server).await;
        let zeroes = OwnedFd::from(File::open("/dev/zero").expect("it is there"));
        let mut ring = front_end.start(0, zeroes, event(0)).await;
        front_end.request(&mut ring, 1, 0, &[1; 512]);
        ring.look().await;
        assert_eq!(server.statistics().kicks, 0, "they are without end");
        let kick = event(0);
        front_end.set_event(code::SET_VRING_KICK, 0, &kick).await;
        ring.kick = kick;
        // The kick is used once polling finds nothing.
        while server.statistics().kicks == 0 {
            front_end.request(&mut ring, 1, 0, &[1; 512]);
            ring.kick();
            ring.look().await;
            reactor::sleep_until(reactor::now() + Duration::from_millis(1)).await;
        }
        front_end.leave().await;
    });
}

#[test]
fn a_blocking_call_event_delays_no_request() {
    real(async {
        let server = server(Limits::default());
        let mut front_end = SocketFrontEnd::connect(&server).await;
        let full = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).expect("so much fits");
        let mut ring = front_end.start(0, event(0), full).await;
        for _ in 0..3 {
            front_end.request(&mut ring, 1, 0, &[1; 512]);
            ring.kick();
            ring.look().await;
        }
        assert!(server.statistics().calls > 0);
        front_end.leave().await;
    });
}

#[test]
fn broken_ring_signals_its_error_event_and_others_continue() {
    real(async {
        let server = server(Limits::default());
        let mut front_end = SocketFrontEnd::connect(&server).await;
        let mut bad = front_end.start(0, event(0), event(0)).await;
        let mut good = front_end.start(1, event(0), event(0)).await;
        front_end.request(&mut bad, 1, 0, &[1; 512]);
        bad.kick_and_wait().await;
        bad.available.store_u16(2, 1000, std::sync::atomic::Ordering::Release);
        rustix::io::write(&bad.kick, &1_u64.to_ne_bytes()).expect("there is room");
        wait_for_signal(&bad.error).await;
        while server.statistics().queues > 1 {
            reactor::yield_now().await;
        }
        let at = front_end.request(&mut good, 0, 0, &[GUARD; 512]);
        good.kick_and_wait().await;
        assert_eq!(front_end.data(at), ([1; 512], 0));
        // The guest sets the ring up again.
        assert_eq!(front_end.stop(0).await, 1);
        front_end.memory.range(0, 0x3000).expect("inside").fill(0, 0x3000, 0);
        let mut restarted = front_end.start(0, event(0), event(0)).await;
        front_end.request(&mut restarted, 1, 0, &[2; 512]);
        restarted.kick_and_wait().await;
        front_end.leave().await;
        assert_eq!(server.statistics().queues, 0);
    });
}

#[test]
fn thousands_of_broken_rings_log_one_line() {
    real(async {
        let device = Arc::clone(&server(Limits::default()).device);
        (0..1000).for_each(|ring| report_unserved_ring(&device, ring, &"it is broken", None));
        let later = reactor::now() + TEST_TIMEOUT;
        assert!(device.broken_ring_logs.try_log(later).is_some_and(|suppressed| suppressed > 900));
    });
}
