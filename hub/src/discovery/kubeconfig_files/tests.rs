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
        let names = self.last_poll.files.values();
        names.map(|file| file.source.member.clone()).collect()
    }

    fn access(&self, name: &str) -> Result<String, String> {
        let access = &self.last_poll.files[&self.path(name)].source.access;
        match access {
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
    let origin = &directory.last_poll.files[&directory.path("b.kubeconfig")]
        .source
        .origin;
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
    let before = Arc::clone(&directory.last_poll.files[&directory.path("b.yaml")].source);
    directory.write("a.yaml", "apiVersion: v1\nkind: Conf");
    assert_eq!(directory.poll(), ["a", "b"]);
    let error = directory.access("a.yaml").unwrap_err();
    assert!(error.contains("a.yaml"), "{error}");
    let after = &directory.last_poll.files[&directory.path("b.yaml")].source;
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
    assert!(matches!(absent, PollError::Absent { .. }), "{absent}");
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
    assert_eq!(previous.files[&path].source.member, "admin");
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
    for number in 0..FILES_MAX {
        directory.write(&format!("c-{number}.yaml"), "");
    }
    assert_eq!(directory.poll().len(), FILES_MAX);
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
    let origin = |name: &str| Origin {
        kind: SourceKind::File,
        namespace: None,
        name: name.to_owned(),
    };
    assert!(files.covers(&origin("/mounted/here")));
    assert!(files.covers(&origin("/mounted/here/a.yaml")));
    assert!(!files.covers(&origin("/mounted/here/deeper/a.yaml")));
    assert!(!files.covers(&origin("/mounted/hereafter")));
}
