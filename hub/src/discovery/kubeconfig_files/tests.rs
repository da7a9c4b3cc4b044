use std::os::unix::fs::{PermissionsExt as _, symlink};

use super::*;
use crate::discovery::object_and_secret::tests::kubeconfig;

/// A directory, and the result of its last poll.
struct Directory {
    folder: tempfile::TempDir,
    last_poll: PollResult,
}

impl Directory {
    fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
            last_poll: PollResult::default(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, content: &str) {
        fs::write(self.path(name), content).unwrap();
    }

    fn poll(&mut self) -> Vec<String> {
        let result = poll(self.folder.path(), &Policy::default(), &self.last_poll);
        self.last_poll = result.unwrap();
        let sources = self.last_poll.sources();
        sources.map(|source| source.member.clone()).collect()
    }

    /// The source of a file's current context.
    fn source(&self, name: &str) -> &Arc<Source> {
        &self.last_poll.files[&self.path(name)].sources[0]
    }

    fn access(&self, name: &str) -> Result<String, String> {
        match &self.source(name).access {
            Ok(access) => Ok(access.server.clone()),
            Err(error) => Err(error.message.clone()),
        }
    }
}

#[test]
fn directory_file_becomes_member_named_before_first_dot() {
    let mut directory = Directory::new();
    for name in ["b.kubeconfig", "a.prod.yaml", "c.yml", "d.conf"] {
        directory.write(name, &kubeconfig("https://one:6443"));
    }
    for name in [".hidden.yaml", "readme.md", "noextension"] {
        directory.write(name, &kubeconfig("https://one:6443"));
    }
    fs::create_dir(directory.path("folder.yaml")).unwrap();
    assert_eq!(directory.poll(), ["a", "b", "c", "d"]);
    assert_eq!(
        directory.access("b.kubeconfig").unwrap(),
        "https://one:6443"
    );
    let origin = &directory.source("b.kubeconfig").origin;
    assert_eq!(origin.kind, SourceKind::File);
    assert_eq!(Path::new(&origin.name), directory.path("b.kubeconfig"));
}

#[test]
fn rewritten_file_is_reread_and_fault_stays_local() {
    let mut directory = Directory::new();
    directory.write("a.yaml", &kubeconfig("https://one:6443"));
    directory.write("b.yaml", &kubeconfig("https://two:6443"));
    directory.poll();
    directory.poll();
    let before = Arc::clone(directory.source("b.yaml"));
    directory.write("a.yaml", "apiVersion: v1\nkind: Conf");
    assert_eq!(directory.poll(), ["a", "b"]);
    let error = directory.access("a.yaml").unwrap_err();
    assert!(error.contains("a.yaml"), "{error}");
    let after = directory.source("b.yaml");
    assert!(Arc::ptr_eq(&before, after), "what is as it was is not read");
    directory.write("a.yaml", &kubeconfig("https://three:6443"));
    directory.poll();
    assert_eq!(directory.access("a.yaml").unwrap(), "https://three:6443");
}

#[test]
fn change_within_clock_granularity_is_detected() {
    let mut directory = Directory::new();
    directory.write("a.yaml", &kubeconfig("https://one:6443"));
    directory.poll();
    directory.write("a.yaml", &kubeconfig("https://two:6443"));
    // Simulate a clock that has not moved.
    let stamp = FileStamp::new(&fs::metadata(directory.path("a.yaml")).unwrap());
    let file = directory.last_poll.files.values_mut().next().unwrap();
    file.stamp = Some(stamp);
    directory.poll();
    assert_eq!(directory.access("a.yaml").unwrap(), "https://two:6443");
}

#[test]
fn a_mounted_configmap_changes_by_its_swapped_link() {
    let mut directory = Directory::new();
    let put = |directory: &Directory, version: &str, server: &str| {
        fs::create_dir(directory.path(version)).unwrap();
        directory.write(&format!("{version}/a.yaml"), &kubeconfig(server));
        symlink(version, directory.path("..next")).unwrap();
        fs::rename(directory.path("..next"), directory.path("..data")).unwrap();
    };
    put(&directory, "..2026_1", "https://one:6443");
    symlink("..data/a.yaml", directory.path("a.yaml")).unwrap();
    assert_eq!(directory.poll(), ["a"]);
    directory.poll();
    put(&directory, "..2026_2", "https://two:6443");
    fs::remove_dir_all(directory.path("..2026_1")).unwrap();
    assert_eq!(directory.poll(), ["a"]);
    assert_eq!(directory.access("a.yaml").unwrap(), "https://two:6443");
}

#[test]
fn removed_file_removes_member_removed_directory_fails() {
    let mut directory = Directory::new();
    directory.write("a.yaml", &kubeconfig("https://one:6443"));
    assert_eq!(directory.poll(), ["a"]);
    fs::remove_file(directory.path("a.yaml")).unwrap();
    assert!(directory.poll().is_empty());

    let path = directory.path("mount");
    let (policy, no_poll) = (Policy::default(), PollResult::default());
    let absent = poll(&path, &policy, &no_poll).unwrap_err();
    assert!(absent.to_string().contains("is missing"), "{absent}");
    fs::create_dir(&path).unwrap();
    directory.write("mount/b.yaml", &kubeconfig("https://one:6443"));
    let previous = poll(&path, &policy, &no_poll).unwrap();
    fs::remove_dir_all(&path).unwrap();
    poll(&path, &policy, &previous).unwrap_err();
}

#[test]
fn single_file_path_is_member_until_deleted() {
    let directory = Directory::new();
    directory.write("admin", &kubeconfig("https://one:6443"));
    let (path, policy) = (directory.path("admin"), Policy::default());
    poll(&directory.path("other"), &policy, &PollResult::default()).unwrap_err();
    let previous = poll(&path, &policy, &PollResult::default()).unwrap();
    assert_eq!(previous.files[&path].sources[0].member, "admin");
    fs::remove_file(&path).unwrap();
    let after_deletion = poll(&path, &policy, &previous).unwrap();
    assert!(after_deletion.files.is_empty());
    directory.write("admin", &kubeconfig("https://one:6443"));
    assert_eq!(
        poll(&path, &policy, &after_deletion).unwrap().files.len(),
        1
    );
}

#[test]
fn oversized_irregular_or_excess_file_is_not_read() {
    let mut directory = Directory::new();
    directory.write("big.yaml", &"#".repeat(kubeconfig::SIZE_MAX + 1));
    rustix::fs::mknodat(
        rustix::fs::CWD,
        directory.path("pipe.yaml"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    directory.poll();
    assert!(directory.access("big.yaml").unwrap_err().contains("262144"));
    assert!(
        directory
            .access("pipe.yaml")
            .unwrap_err()
            .contains("not a file")
    );
    for number in 0..CONTEXTS_MAX {
        directory.write(&format!("c-{number}.yaml"), "");
    }
    assert_eq!(directory.poll().len(), CONTEXTS_MAX);
    assert!(directory.last_poll.exceeds_limit);
}

#[test]
fn unreadable_directory_error_names_directory() {
    let directory = Directory::new();
    let path = directory.path("closed");
    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o0)).unwrap();
    // The root user can read the directory anyway.
    if let Err(error) = poll(&path, &Policy::default(), &PollResult::default()) {
        assert!(error.to_string().contains("closed"), "{error}");
    }
}

#[test]
fn path_covers_itself_and_direct_children() {
    let files = KubeconfigFiles::new(Path::new("/mounted/here"), Policy::default());
    for (name, is_covered) in [
        ("/mounted/here", true),
        ("/mounted/here+context", true),
        ("/mounted/here/a.yaml", true),
        ("/mounted/here/a.yaml+arn:b/c", true),
        ("/mounted/here/a+b.yaml+c+d/e", true),
        ("/mounted/here/deeper/a.yaml", false),
        ("/mounted/here/deep+er/a.yaml", false),
        ("/mounted/hereafter", false),
    ] {
        assert_eq!(files.covers(&Origin::file(name)), is_covered, "{name}");
    }
}

/// A kubeconfig whose current context is `c`, with further contexts, each with the name of its cluster entry.
fn with_contexts(others: &[(&str, &str)]) -> String {
    let mut document: serde_json::Value =
        serde_json::from_str(&kubeconfig("https://one:6443")).unwrap();
    let contexts = document["contexts"].as_array_mut().unwrap();
    contexts.extend(others.iter().map(|(name, cluster)| {
        serde_json::json!({"name": name, "context": {"cluster": cluster, "user": "u"}})
    }));
    document.to_string()
}

#[test]
fn each_context_is_a_separate_source() {
    let mut directory = Directory::new();
    let arn = "arn:aws:eks:eu-central-1:1234:cluster/Edge_1";
    directory.write(
        "a.prod.yaml",
        &with_contexts(&[("z", "c"), (arn, "c"), ("bad", "missing")]),
    );
    let expected = [
        "a",
        "a-arn-aws-eks-eu-central-1-1234-cluster-edge-1",
        "a-bad",
        "a-z",
    ];
    assert_eq!(directory.poll(), expected);
    let sources: Vec<_> = directory.last_poll.sources().collect();
    let path = directory.path("a.prod.yaml").display().to_string();
    let origin = |source: &Source| source.origin.name.clone();
    assert_eq!(origin(sources[0]), path);
    assert_eq!(origin(sources[1]), format!("{path}+{arn}"));
    let bad = sources[2].access.as_ref().unwrap_err();
    assert_eq!(bad.reason, reason::KUBECONFIG_INVALID);
    assert!(bad.message.contains("a.prod.yaml+bad"), "{bad:?}");
    for good in [0, 1, 3] {
        assert!(sources[good].access.is_ok(), "{good}");
    }

    // A context that disappears leaves the others.
    directory.write("a.prod.yaml", &with_contexts(&[("z", "c")]));
    assert_eq!(directory.poll(), ["a", "a-z"]);
}

#[test]
fn unreadable_file_keeps_its_known_contexts() {
    let mut directory = Directory::new();
    directory.write("a.yaml", &with_contexts(&[("b", "c")]));
    assert_eq!(directory.poll(), ["a", "a-b"]);
    let no_current = kubeconfig("https://one:6443").replace("current-context", "extensions");
    for unreadable in ["", "apiVersion: v1\nkind: Conf", &no_current] {
        directory.write("a.yaml", unreadable);
        assert_eq!(directory.poll(), ["a", "a-b"], "{unreadable}");
        for source in directory.last_poll.sources() {
            let problem = source.access.as_ref().unwrap_err();
            assert!(problem.message.contains("a.yaml: "), "{problem:?}");
        }
    }
    directory.write("a.yaml", &with_contexts(&[]));
    assert_eq!(directory.poll(), ["a"]);
    assert!(directory.access("a.yaml").is_ok());
}

#[test]
fn limit_applies_to_contexts_of_all_files() {
    let names: Vec<String> = (0..CONTEXTS_MAX)
        .map(|number| format!("{number:04}"))
        .collect();
    let contexts: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "c")).collect();
    let mut directory = Directory::new();
    directory.write("a.yaml", &with_contexts(&contexts[1..]));
    directory.write("b.yaml", "");
    let members = directory.poll();
    assert_eq!(members.len(), CONTEXTS_MAX);
    assert!(members.iter().all(|member| member.starts_with('a')));
    assert!(directory.last_poll.exceeds_limit);
    fs::remove_file(directory.path("b.yaml")).unwrap();
    assert_eq!(directory.poll().len(), CONTEXTS_MAX);
    assert!(!directory.last_poll.exceeds_limit);
}

#[test]
fn context_that_does_not_fit_has_its_digest() {
    let (long, control) = ("x".repeat(300), "a\nb");
    for context in [long.as_str(), control] {
        let (origin, member) = context_names("/d/a.yaml", "a", context);
        let digest = origin.strip_prefix("/d/a.yaml+").unwrap();
        assert_eq!(digest.len(), DIGEST_CHARACTERS);
        assert_eq!(member, format!("a-{digest}"));
    }
    assert_eq!(context_names("/d/a.yaml", "a", "-ä B-").1, "a-b");
}
