use super::*;

fn read(text: &str) -> Result<ImageDescription, String> {
    let read = match text.starts_with("json:") {
        true => ImageDescription::from_name(text),
        false => ImageDescription::from_options(text),
    };
    read.map_err(|error| format!("{error:#}"))
}

fn place(text: &str) -> String {
    read(text).unwrap().image.to_spec().unwrap()
}

#[test]
fn a_format_lies_over_a_file() {
    let image = read("driver=raw,offset=1M,size=2M,file.driver=file,file.filename=/a,,b").unwrap();
    assert_eq!(
        (image.format, image.image.to_spec().unwrap().as_str()),
        (Some(ImageFormat::Raw), "file:/a,b")
    );
    assert_eq!(image.part, Some(StoragePart { offset: 1 << 20, size: Some(2 << 20) }));
    let image = read(
        "driver=qcow2,file.filename=a,l2-cache-size=1M,encrypt.key-secret=s,cache.direct=on,read-only=on,\
         discard=unmap,detect-zeroes=on,backing=",
    )
    .unwrap();
    assert_eq!(image.format, Some(ImageFormat::Qcow2));
    assert_eq!(image.caches.l2, Some(image::qcow2::L2CacheSize::Bytes(1 << 20)));
    assert_eq!(image.cache_options, [("l2-cache-size".to_owned(), "1M".to_owned())]);
    assert_eq!((image.key_secret.as_deref(), image.read_only, image.no_backing), (Some("s"), true, true));
    assert_eq!((image.cache, image.discard), (Some(CacheMode::None), Some(Discards::Unmap)));
    assert_eq!(image.detect_zeroes, Some(DetectZeroes::On));
    // As in qemu-img: without a format driver, the format is probed.
    assert_eq!(read("file.filename=a").unwrap().format, None);
    assert_eq!(read("driver=file,filename=a").unwrap().format, Some(ImageFormat::Raw));
    // The last value of a repeated key applies.
    assert_eq!(read("driver=qcow2,driver=raw,file.filename=a").unwrap().format, Some(ImageFormat::Raw));
    assert_eq!(
        read("driver=qcow2,file.driver=raw,file.file.filename=a").unwrap().format,
        Some(ImageFormat::Qcow2)
    );
}

#[test]
fn json_has_the_same_keys() {
    for (json, options) in [
        (
            r#"json:{"file": {"driver": "file", "filename": "/a"}, "driver": "qcow2", "backing": null}"#,
            "driver=qcow2,backing=,file.driver=file,file.filename=/a",
        ),
        (
            r#"json:{"encrypt.key-secret": "sec0", "driver": "qcow2", "file": {"filename": "a"}}"#,
            "driver=qcow2,encrypt.key-secret=sec0,file.filename=a",
        ),
        (
            r#"json:{"driver": "raw", "offset": 512, "read-only": true, "file.filename": "a"}"#,
            "driver=raw,offset=512,read-only=on,file.filename=a",
        ),
        (
            r#"json:{"driver": "rbd", "pool": "p", "image": "i", "server": [{"host": "::1", "port": "7"}]}"#,
            "driver=rbd,pool=p,image=i,server.0.host=::1,server.0.port=7",
        ),
    ] {
        assert_eq!(read(json).unwrap(), read(options).unwrap(), "{json}");
    }
}

#[test]
fn each_protocol_has_a_location() {
    for (text, expect) in [
        ("driver=raw,file.driver=nbd,file.server.type=unix,file.server.path=/s", "nbd+unix:///?socket=/s"),
        (
            "driver=qcow2,file.driver=nbd,file.server.type=inet,file.server.host=::1,file.server.port=7,file.export=a b",
            "nbd://[::1]:7/a%20b",
        ),
        ("driver=nbd,host=h,export=x", "nbd://h:10809/x"),
        ("driver=raw,file.filename=nbd://host/x", "nbd://host/x"),
        ("driver=raw,file.driver=file,file.filename=nbd://host/x", "file:nbd://host/x"),
        ("driver=raw,file.driver=host_device,file.filename=/dev/sda", "file:/dev/sda"),
        ("driver=raw,file.driver=null-co,file.size=1M", "null:1048576"),
        ("driver=null-co", "null:1073741824"),
        (
            "driver=raw,file.driver=rbd,file.pool=p,file.image=i,file.conf=/c,file.user=u,file.server.0.host=h,file.server.0.port=3300",
            "rbd:p/i:conf=/c:id=u:mon_host=h\\:3300",
        ),
    ] {
        assert_eq!(place(text), expect, "{text}");
    }
}

#[test]
fn mistakes_name_their_key() {
    for (text, expect) in [
        (
            "driver=raw,file.filename=a,bogus=1",
            "bogus: is not a key of the driver raw (there are file, offset, size, auto-read-only, ",
        ),
        (
            "driver=raw,file.filename=a,file.lokcing=on",
            "file.lokcing: is not a key of the driver file (did you mean file.locking?)",
        ),
        ("driver=raw,file.filename=a,read-only=maybe", "read-only=maybe: is neither on nor off"),
        (
            "driver=raw,file.filename=a,cache.direct=on,cache.no-flush=on",
            "cache.no-flush=on: not supported with",
        ),
        ("driver=raw", "file.filename: is missing (add file.filename=PATH)"),
        (
            "driver=raw,file.filename=a,backing.file.filename=b",
            "backing.file.filename: is not a key of the driver raw",
        ),
        (
            "driver=qcow2,file.filename=a,backing.file.filename=b",
            "backing.file.filename: a backing file is opened as the image names it",
        ),
        ("driver=qcow2,file.filename=a,backing=b", "backing=b: names a node"),
        ("driver=luks,file.filename=a", "driver=luks: not supported (there are file, host_device"),
        ("driver=raw,file.driver=iscsi,file.lun=1", "file.driver=iscsi: not supported"),
        (
            "a.qcow2",
            "file=a.qcow2: names a node, but named nodes are not supported (give file.filename=PATH)",
        ),
        ("filename=a", "file.filename: is missing"),
        ("driver=qcow2,filename=a,file.filename=b", "filename: is not a key of the driver qcow2"),
        ("drive=qcow2,file.filename=a", "drive: is not a known key (did you mean driver?)"),
        ("size=1,file.filename=a", "size: needs a driver (add driver=raw or driver=qcow2)"),
        ("driver=raw,file.driver=nbd", "file.server: give server.type=inet"),
        ("driver=raw,file.driver=nbd,file.path=/s,file.tls-creds=t", "file.tls-creds: not supported"),
        ("driver=raw,file.filename=json:{}", "file.filename=json:{}: the protocol 'json' is not supported"),
        ("driver=raw,file.filename=a,file.locking=off", "file.locking=off: files are always locked"),
        (
            "driver=raw,file.filename=a,force-share=on",
            "force-share=on: only for images that are not written to",
        ),
        ("driver=raw,size=0,file.filename=a", "size=0: is not a disk size"),
        (
            "driver=qcow2,file.driver=raw,file.offset=1,file.file.filename=a",
            "file.offset, file.size: not supported below",
        ),
        ("driver=qcow2,encrypt.format=aes,file.filename=a", "encrypt.format=aes: QEMU's older encryption"),
        ("driver=qcow2,l2-cache-size=x,file.filename=a", "l2-cache-size=x: is not a size"),
        (
            "driver=qcow2,l2-cache-size=1M,refcount-cache-size=1M,cache-size=2M,file.filename=a",
            "may not be set together",
        ),
        ("driver", "driver: file=driver: names a node"),
        ("json:[]", "json:[]: is not a JSON object"),
        ("json:{", "json:{: is not JSON: EOF"),
        (r#"json:{"driver": null}"#, "driver: is null"),
        (r#"json:{"file.driver": "file", "file": {"driver": "nbd"}}"#, "file.driver: is given twice"),
        (r#"json:{"driver": "raw", "file": "node"}"#, "file=node: names a node"),
    ] {
        let refused = read(text).unwrap_err();
        assert!(refused.contains(expect.trim_start_matches("driver: ")), "{text}: {refused}");
    }
    // Neither the parser nor the nodes may exhaust the stack.
    let nested = format!("json:{}1{}", "{\"file\":".repeat(200), "}".repeat(200));
    assert!(read(&nested).unwrap_err().contains("recursion limit"));
    let raws: String = (0..20).map(|depth| format!("{}driver=raw,", "file.".repeat(depth))).collect();
    assert!(read(&raws).unwrap_err().contains("more than 8 stacked nodes"));
}

#[test]
fn a_plain_name_is_a_path_or_an_address() {
    let spec = |name: &str| {
        let image = ImageDescription::from_name(name).map_err(|error| format!("{error:#}"))?;
        Ok::<_, String>(image.image.to_spec().unwrap())
    };
    assert_eq!(spec("file:/a").unwrap(), "file:/a");
    assert_eq!(spec("./a:b").unwrap(), "file:./a:b");
    assert_eq!(spec("nbd://host/x").unwrap(), "nbd://host/x");
    assert!(spec("nbd:host:7").unwrap_err().contains("the protocol 'nbd' is not supported"));
    assert!(spec("memory:1G").unwrap_err().contains("'memory'"));
}

#[test]
fn a_name_in_json_is_a_string() {
    for (text, key) in [
        (r#"json:{"driver": "raw", "file": {"driver": "file", "filename": 5}}"#, "file.filename: 5"),
        (r#"json:{"driver": "raw", "file.filename": true}"#, "file.filename: true"),
    ] {
        let refused = format!("{:#}", ImageDescription::from_name(text).unwrap_err());
        assert!(refused.contains(&format!("{key}: is not a string")), "{text}: {refused}");
    }
    let named = ImageDescription::from_name(r#"json:{"driver": "raw", "size": 512, "file.filename": "5"}"#);
    assert_eq!(named.unwrap().image.path(), Some(Path::new("5")));
}
