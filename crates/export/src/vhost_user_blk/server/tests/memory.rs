//! Guest memory that is added, removed and logged while rings are served.

use super::*;

#[test]
fn memory_regions_change_under_a_running_ring() {
    const MORE: u64 = 1 << 20;
    real(async {
        let server = server(Limits::default());
        let mut front_end = SocketFrontEnd::connect(&server).await;
        let mut ring = front_end.start(0, event(0), event(0)).await;
        let log = memory_file(4096);
        let bits =
            Region::map(log.try_clone().expect("a descriptor"), 0, 0, 4096, 0, &MappingQuota::new(1, 4096));
        let bits =
            GuestMemory::new(vec![bits.expect("mapped")]).expect("one region").range(0, 64).expect("inside");
        let marked = || {
            let mut bytes = [0; 64];
            bits.read(0, &mut bytes);
            bits.fill(0, 64, 0);
            (0..512_u64).filter(|page| bytes[*page as usize / 8] & 1 << (page % 8) != 0).collect::<Vec<_>>()
        };
        let at = front_end.request(&mut ring, 0, 0, &[GUARD; 512]);
        ring.kick_and_wait().await;
        assert_eq!(front_end.data(at).1, 0);
        let area = [4096_u64, 0].map(u64::to_ne_bytes).concat();
        front_end.request_acknowledged(code::SET_LOG_BASE, &area, &[log.as_fd()]).await;
        let _written_without_a_request = marked();
        let at = front_end.request(&mut ring, 0, 0, &[GUARD; 512]);
        ring.kick_and_wait().await;
        assert_eq!(marked(), [2, at / 4096], "the used ring, and the request's page");

        let region = [0, MORE, MEMORY_BYTES, USER + MORE, 0].map(u64::to_ne_bytes).concat();
        let file = front_end.file.try_clone().expect("a descriptor");
        let piece = |address, bytes, writable| Piece { address, bytes, writable };
        // The data is in the same file at another guest address.
        let statuses = [(true, 0, vec![2, 8, (MORE + 0x9000) / 4096]), (false, 1, vec![2, 8])];
        for (is_added, status, pages) in statuses {
            match is_added {
                true => front_end.request_acknowledged(code::ADD_MEM_REG, &region, &[file.as_fd()]).await,
                false => front_end.request_acknowledged(code::REM_MEM_REG, &region, &[]).await,
            }
            let header = front_end.memory.range(REQUESTS, 0x1000).expect("inside");
            header.fill(0, 16, 0);
            let data = piece(MORE + 0x9000, 512, true);
            let pieces = [piece(REQUESTS, 16, false), data, piece(REQUESTS + 1024, 1, true)];
            let _written_without_a_request = marked();
            ring.driver.add(&pieces).expect("there is room");
            ring.kick_and_wait().await;
            assert_eq!(front_end.data(REQUESTS).1, status);
            assert_eq!(marked(), pages);
        }
        front_end.leave().await;
    });
}

#[test]
fn requests_in_removed_memory_are_not_served() {
    const MORE: u64 = 1 << 20;
    real(async {
        let server = server(one_request_per_second(LimitKind::IopsTotal));
        let front_end = SocketFrontEnd::connect(&server).await;
        let mut ring = front_end.start(0, event(0), event(0)).await;
        let file = memory_file(MEMORY_BYTES);
        let region = [0, MORE, MEMORY_BYTES, USER + MORE, 0].map(u64::to_ne_bytes).concat();
        front_end.request_acknowledged(code::ADD_MEM_REG, &region, &[file.as_fd()]).await;
        ftruncate(&file, 0).expect("its length");
        // The ring is in the first region. Most of these requests wait for limits.
        let piece = |address, bytes, writable| Piece { address, bytes, writable };
        for number in 0..10 {
            let at = REQUESTS + number * 0x1000;
            let buffer = front_end.memory.range(at, 0x1000).expect("inside");
            buffer.write(8, &(number * 100).to_le_bytes());
            buffer.write(1024, &[GUARD]);
            let data = piece(MORE + number * 0x1000, 512, true);
            ring.driver.add(&[piece(at, 16, false), data, piece(at + 1024, 1, true)]).expect("there is room");
        }
        ring.kick();
        wait_for_signal(&ring.error).await;
        while server.statistics().queues > 0 {
            reactor::yield_now().await;
        }
        for number in 0..10 {
            let (_, status) = front_end.data(REQUESTS + number * 0x1000);
            assert!([1, GUARD].contains(&status), "request {number}: {status}");
        }
        assert_eq!(front_end.data(REQUESTS).1, 1, "it has met it");
        assert_eq!(server.statistics().in_flight, 0);
        front_end.leave().await;
    });
}
