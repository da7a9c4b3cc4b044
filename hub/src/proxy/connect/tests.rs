//! A newer access takes the place of the one in use.

use std::fs;

use super::*;
use crate::discovery::SourceKind;

fn connection(
    folder: &Path,
    content: &str,
    uid: &str,
    namespace: Option<&str>,
) -> MemberConnection {
    let origin = Origin {
        kind: SourceKind::Secret,
        namespace: namespace.map(str::to_owned),
        name: "edge-1".to_owned(),
    };
    let used = AccessInUse {
        origin: Some(origin),
        first_hop: None,
        validity: None,
        digest: content.to_owned(),
        _refusal_task: AbortOnDropHandle::new(tokio::spawn(std::future::pending())),
    };
    let kubeconfig = access::write_kubeconfig(folder, content).unwrap();
    let nowhere = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
    let client = || Client::try_from(nowhere.clone()).unwrap();
    let mut connection = MemberConnection::new([client(), client()], kubeconfig, used);
    connection.uid = uid.to_owned();
    connection
}

#[tokio::test]
async fn rotated_access_keeps_its_kubeconfigs_path() {
    let folder = tempfile::tempdir().unwrap();
    let current = connection(folder.path(), "old", "uid", Some("a"));
    let path = current.kubeconfig().to_owned();
    let newer = connection(folder.path(), "new", "uid", Some("a"));
    assert!(current.take_over(newer).is_none());
    assert_eq!(fs::read_to_string(&path).unwrap(), "new");
    assert_eq!(current.used().digest, "new");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    drop(current);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn access_of_other_cluster_or_namespace_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let current = connection(folder.path(), "old", "uid", Some("a"));
    for (uid, namespace) in [("other", "a"), ("uid", "b")] {
        let newer = connection(folder.path(), "new", uid, Some(namespace));
        let rejected = current.take_over(newer).unwrap();
        assert_eq!((&*rejected.uid, &*rejected.used().digest), (uid, "new"));
    }
    assert_eq!(fs::read_to_string(current.kubeconfig()).unwrap(), "old");
}
