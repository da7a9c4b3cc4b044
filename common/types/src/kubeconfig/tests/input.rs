//! Tests for parsing bytes into one document.

use super::*;

#[test]
fn block_yaml_with_comments_bom_and_crlf_parses() {
    let text = format!(
        "\u{feff}# written by kubeadm\napiVersion: v1\nkind: Config\ncurrent-context: c\n{}clusters:\n- \
         cluster:\n    server: https://h:1\n    certificate-authority-data: |\n      {}\n      {}\n  name: k\n\
         contexts:\n- context: &x\n    cluster: k\n    user: u\n  name: c\n- context: *x\n  name: d\n\
         users:\n- name: u\n  user:\n    token: \"{TOKEN}\"\n    client-certificate-data: {}\n    \
         client-key-data: {}\n",
        "# many comments\n".repeat(100),
        ISSUED.ca.split_at(40).0,
        ISSUED.ca.split_at(40).1,
        ISSUED.certificate,
        ISSUED.key,
    )
    .replace('\n', "\r\n");
    let sanitized = parse(text.as_bytes(), &Policy::default()).unwrap();
    let rebuilt: Value = serde_json::from_str(&sanitized.yaml).unwrap();
    assert_eq!(
        rebuilt["clusters"][0]["cluster"]["certificate-authority-data"],
        *ISSUED.ca
    );
    assert_eq!(rebuilt["users"][0]["user"]["client-key-data"], *ISSUED.key);
    assert_eq!(sanitized.namespace, None);
}

#[test]
fn document_markers_and_a_merge_key_are_read() {
    let text = good().to_string();
    assert_eq!(
        parse(format!("---\n{text}\n").as_bytes(), &Policy::default()),
        parsed(&good())
    );
    assert_eq!(
        parse(format!("{text}\n...\n").as_bytes(), &Policy::default()),
        parsed(&good())
    );

    let merged = "
clusters: [{name: k, cluster: {server: 'https://h'}}]
contexts: [{name: c, context: &x {cluster: k, user: u}}, {name: d, context: {<<: *x}}]
users: [{name: u, user: {token: t}}]
current-context: d
";
    assert!(parse(merged.as_bytes(), &Policy::default()).is_ok());
    let hidden = merged.replace("user: u}}, {", "user: u, exec: {}}}, {");
    assert_eq!(
        parse_error(hidden.as_bytes()),
        "contexts[1].context.exec is not a known field: remove it or correct its name"
    );
}

#[test]
fn invalid_yaml_document_is_rejected_with_position() {
    let two = format!("{}\n---\n{}\n", good(), good());
    let second = "kubeconfig is not read at line 3, column 1: it contains more than one YAML";
    // Some parsers would use the second server, others the first.
    let duplicate = "clusters:\n- cluster:\n    server: a\n    server: b\n";
    let twice = "kubeconfig is not read at line 4, column 5: it contains a key twice";
    for (bytes, message) in [
        (b"".as_slice(), "failed to determine current context"),
        (b"null", "failed to determine current context"),
        (b"{}", "failed to determine current context"),
        (b"# nothing\n", "failed to determine current context"),
        (b"- a\n", "kubeconfig is not read: its root is not a map"),
        (
            b"just text",
            "kubeconfig is not read: its root is not a map",
        ),
        (two.as_bytes(), second),
        (duplicate.as_bytes(), twice),
        (b"a: [b", "kubeconfig is not read at line 1, column "),
        (b"a: b: c", "kubeconfig is not read at line 1, column "),
        (b"ab\xff\xfe", "kubeconfig is not UTF-8 text, at byte 2"),
        (b"\xff\xfea\x00", "kubeconfig is not UTF-8 text, at byte 0"),
        (b"a\x00:\x00", "kubeconfig has a NUL at byte 1"),
    ] {
        let error = parse_error(bytes);
        assert!(error.starts_with(message), "{error}");
    }
}

#[test]
fn yaml_bombs_are_stopped_by_a_bound() {
    let mut laughs = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n".to_owned();
    for i in 1..10 {
        let before = format!("*a{}", i - 1);
        laughs.push_str(&format!(
            "a{i}: &a{i} [{}]\n",
            [before.as_str(); 9].join(",")
        ));
    }
    let wide_alias = format!(
        "a: &a \"{}\"\nb: [{}]\n",
        "x".repeat(100_000),
        "*a,".repeat(5000)
    );
    let many_items = format!("a: [{}]", "x,".repeat(60_000));
    for bomb in [
        laughs,
        wide_alias,
        many_items,
        "[".repeat(200_000),
        "{a: ".repeat(50_000),
        "- ".repeat(100_000),
        "a: &a [*a]".to_owned(),
    ] {
        assert!(bomb.len() <= SIZE_MAX);
        let error = parse_error(bomb.as_bytes());
        assert!(
            error.starts_with("kubeconfig is not read at line "),
            "{error}"
        );
    }
    let scalar = format!("{{\"x\": \"{}\"}}", "y".repeat(SIZE_MAX - 4096));
    assert!(parse_error(scalar.as_bytes()).starts_with("x is not a known field"));
}

#[test]
fn the_size_is_capped_before_anything_is_parsed() {
    let padding = |size: usize| {
        let text = good().to_string();
        format!("{text}\n#{}", "x".repeat(size - text.len() - 2))
    };
    assert!(parse(padding(SIZE_MAX).as_bytes(), &Policy::default()).is_ok());
    assert_eq!(
        parse(padding(SIZE_MAX + 1).as_bytes(), &Policy::default()),
        Err(KubeconfigError::TooLarge { size: SIZE_MAX + 1 })
    );
}

#[test]
fn only_utf8_is_read_bom_and_crlf_allowed() {
    let text = format!("{:#}\n", good());
    let utf16 = |bytes: fn(u16) -> [u8; 2]| -> Vec<u8> {
        let units = std::iter::once(0xfeff).chain(text.encode_utf16());
        units.flat_map(bytes).collect()
    };
    for bytes in [utf16(u16::to_be_bytes), utf16(u16::to_le_bytes)] {
        assert_eq!(
            parse_error(&bytes),
            "kubeconfig is not UTF-8 text, at byte 0"
        );
    }
    let latin = [text.as_bytes(), b"# caf\xe9\n"].concat();
    let position = latin.len() - 2;
    let expected = format!("kubeconfig is not UTF-8 text, at byte {position}");
    assert_eq!(parse_error(&latin), expected);
    let crlf = text.replace('\n', "\r\n");
    for same in [
        format!("\u{feff}{text}"),
        crlf.clone(),
        format!("\u{feff}{crlf}"),
    ] {
        assert_eq!(parse(same.as_bytes(), &Policy::default()), parsed(&good()));
    }
}
