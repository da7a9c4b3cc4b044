use std::os::unix::fs::{PermissionsExt as _, symlink};

use super::*;
use crate::discovery::object_and_secret::tests::kubeconfig;

/// A directory, and the result of its last poll.
struct Place {
    folder: tempfile::TempDir,
    seen: Seen,
}

impl Place {
    fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
            seen: Seen::default(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, content: &str) {
        fs::write(self.path(name), content).unwrap();
    }

    fn look(&mut self) -> Vec<String> {
        let seen = look(self.folder.path(), &Policy::default(), &self.seen);
        self.seen = seen.unwrap();
        let names = self.seen.files.values();
        names.map(|file| file.source.member.clone()).collect()
    }

    fn access(&self, name: &str) -> Result<String, String> {
        let access = &self.seen.files[&self.path(name)].source.access;
        match access {
            Ok(access) => Ok(access.server.clone()),
            Err(fault) => Err(fault.message.clone()),
        }
    }
}

#[test]
fn directory_file_becomes_member_named_before_first_dot() {
    let mut place = Place::new();
    for name in ["b.kubeconfig", "a.prod.yaml", "c.yml", "d.conf"] {
        place.write(name, &kubeconfig("https://one:6443"));
    }
    for name in [".hidden.yaml", "readme.md", "noextension"] {
        place.write(name, &kubeconfig("https://one:6443"));
    }
    fs::create_dir(place.path("folder.yaml")).unwrap();
    assert_eq!(place.look(), ["a", "b", "c", "d"]);
    assert_eq!(place.access("b.kubeconfig").unwrap(), "https://one:6443");
    let origin = &place.seen.files[&place.path("b.kubeconfig")].source.origin;
    assert_eq!(origin.kind, Kind::File);
    assert_eq!(Path::new(&origin.name), place.path("b.kubeconfig"));
}

#[test]
fn rewritten_file_is_reread_and_fault_stays_local() {
    let mut place = Place::new();
    place.write("a.yaml", &kubeconfig("https://one:6443"));
    place.write("b.yaml", &kubeconfig("https://two:6443"));
    place.look();
    place.look();
    let before = Arc::clone(&place.seen.files[&place.path("b.yaml")].source);
    place.write("a.yaml", "apiVersion: v1\nkind: Conf");
    assert_eq!(place.look(), ["a", "b"]);
    let fault = place.access("a.yaml").unwrap_err();
    assert!(fault.contains("a.yaml"), "{fault}");
    let after = &place.seen.files[&place.path("b.yaml")].source;
    assert!(Arc::ptr_eq(&before, after), "what is as it was is not read");
    place.write("a.yaml", &kubeconfig("https://three:6443"));
    place.look();
    assert_eq!(place.access("a.yaml").unwrap(), "https://three:6443");
}

#[test]
fn change_within_clock_granularity_is_detected() {
    let mut place = Place::new();
    place.write("a.yaml", &kubeconfig("https://one:6443"));
    place.look();
    place.write("a.yaml", &kubeconfig("https://two:6443"));
    // Simulate a clock that has not moved.
    let stamp = Stamp::of(&fs::metadata(place.path("a.yaml")).unwrap());
    let file = place.seen.files.values_mut().next().unwrap();
    file.stamp = Some(stamp);
    place.look();
    assert_eq!(place.access("a.yaml").unwrap(), "https://two:6443");
}

#[test]
fn a_mounted_configmap_changes_by_its_swapped_link() {
    let mut place = Place::new();
    let put = |place: &Place, version: &str, server: &str| {
        fs::create_dir(place.path(version)).unwrap();
        place.write(&format!("{version}/a.yaml"), &kubeconfig(server));
        symlink(version, place.path("..next")).unwrap();
        fs::rename(place.path("..next"), place.path("..data")).unwrap();
    };
    put(&place, "..2026_1", "https://one:6443");
    symlink("..data/a.yaml", place.path("a.yaml")).unwrap();
    assert_eq!(place.look(), ["a"]);
    place.look();
    put(&place, "..2026_2", "https://two:6443");
    fs::remove_dir_all(place.path("..2026_1")).unwrap();
    assert_eq!(place.look(), ["a"]);
    assert_eq!(place.access("a.yaml").unwrap(), "https://two:6443");
}

#[test]
fn removed_file_removes_member_removed_directory_fails() {
    let mut place = Place::new();
    place.write("a.yaml", &kubeconfig("https://one:6443"));
    assert_eq!(place.look(), ["a"]);
    fs::remove_file(place.path("a.yaml")).unwrap();
    assert!(place.look().is_empty());

    let path = place.path("mount");
    let (policy, never) = (Policy::default(), Seen::default());
    let absent = look(&path, &policy, &never).unwrap_err();
    assert!(matches!(absent, LookError::Absent { .. }), "{absent}");
    fs::create_dir(&path).unwrap();
    place.write("mount/b.yaml", &kubeconfig("https://one:6443"));
    let seen = look(&path, &policy, &never).unwrap();
    fs::remove_dir_all(&path).unwrap();
    look(&path, &policy, &seen).unwrap_err();
}

#[test]
fn single_file_path_is_member_until_deleted() {
    let place = Place::new();
    place.write("admin", &kubeconfig("https://one:6443"));
    let (path, policy) = (place.path("admin"), Policy::default());
    look(&place.path("other"), &policy, &Seen::default()).unwrap_err();
    let seen = look(&path, &policy, &Seen::default()).unwrap();
    assert_eq!(seen.files[&path].source.member, "admin");
    fs::remove_file(&path).unwrap();
    let gone = look(&path, &policy, &seen).unwrap();
    assert!(gone.files.is_empty());
    place.write("admin", &kubeconfig("https://one:6443"));
    assert_eq!(look(&path, &policy, &gone).unwrap().files.len(), 1);
}

#[test]
fn oversized_irregular_or_excess_file_is_not_read() {
    let mut place = Place::new();
    place.write("big.yaml", &"#".repeat(kubeconfig::SIZE_MAX + 1));
    rustix::fs::mknodat(
        rustix::fs::CWD,
        place.path("pipe.yaml"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    place.look();
    assert!(place.access("big.yaml").unwrap_err().contains("262144"));
    assert!(
        place
            .access("pipe.yaml")
            .unwrap_err()
            .contains("not a file")
    );
    for number in 0..FILES_MAX {
        place.write(&format!("c-{number}.yaml"), "");
    }
    assert_eq!(place.look().len(), FILES_MAX);
    assert!(place.seen.left_out);
}

#[test]
fn unreadable_directory_error_names_directory() {
    let place = Place::new();
    let path = place.path("closed");
    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o0)).unwrap();
    // The root user can read the directory anyway.
    if let Err(error) = look(&path, &Policy::default(), &Seen::default()) {
        assert!(error.to_string().contains("closed"), "{error}");
    }
}

#[test]
fn path_covers_itself_and_direct_children() {
    let files = Files::new(Path::new("/mounted/here"), Policy::default());
    let origin = |name: &str| Origin {
        kind: Kind::File,
        namespace: None,
        name: name.to_owned(),
    };
    assert!(files.covers(&origin("/mounted/here")));
    assert!(files.covers(&origin("/mounted/here/a.yaml")));
    assert!(!files.covers(&origin("/mounted/here/deeper/a.yaml")));
    assert!(!files.covers(&origin("/mounted/hereafter")));
}
