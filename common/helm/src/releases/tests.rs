use proptest::prelude::*;
use serde_json::json;

use super::*;

const MANIFEST: &str = r#"---
# Source: shop/templates/service.yaml
apiVersion: v1
kind: Service
metadata:
  name: web
---
# Source: shop/templates/deployment.yaml
apiVersion: apps/v1
kind: Deployment
metadata:
  name: web
spec:
  replicas: 2
  replicas: 3
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: logs, namespace: elsewhere}
---
{"apiVersion": "v1", "kind": "List", "items": [
  {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "db"}}]}
---
apiVersion: apps.kruise.io/v1alpha1
kind: StatefulSet
metadata: {name: not-of-kubernetes}
---
kind: Deployment
metadata: [what, is, this
---
--- Deployment
---
apiVersion: v1
kind: ConfigMap
metadata: {name: notes}
data:
  text: "kind: Deployment"
"#;

/// A release as Helm 4 stores it. Its numbers exceed the range of `f64` and `u64`.
fn stored(status: &str) -> String {
    let manifest = Value::from(MANIFEST);
    format!(
        r#"{{"name":"shop","info":{{"first_deployed":"2026-11-01T10:00:00.123456789Z","last_deployed":"2026-11-01T10:00:00Z","description":"Initial install underway","status":"{status}","notes":"hello\n"}},"chart":{{"metadata":{{"name":"shop","version":"1.2.3","apiVersion":"v2"}},"lock":null,"templates":[{{"name":"templates/deployment.yaml","data":"YXBp"}}],"values":{{"big":123456789012345678901234567890,"small":0.10}},"schema":null,"files":[]}},"config":{{"replicaCount":2}},"manifest":{manifest},"version":7,"namespace":"acme","apply_method":"ssa","of_a_newer_helm":[1e400]}}"#
    )
}

fn secret(data: Vec<u8>) -> Secret {
    serde_json::from_value(json!({
        "metadata": {
            "name": "sh.helm.release.v1.shop.v7",
            "namespace": "acme",
            "resourceVersion": "41",
            "uid": "6f1c",
            "labels": { "name": "shop", "owner": "helm", "status": "pending-install", "version": "7", "own": "kept" },
        },
        "type": SECRET_TYPE,
        "data": { "release": ByteString(data) },
    }))
    .unwrap()
}

fn gzipped_secret(json: &str) -> Secret {
    secret(pack(json.as_bytes()).unwrap())
}

fn workload(kind: WorkloadKind, namespace: &str, name: &str) -> Workload {
    Workload {
        kind,
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    }
}

#[test]
fn a_release_is_read_whether_compressed_or_not() {
    let plain = secret(STANDARD.encode(stored("deployed")).into_bytes());
    for secret in [gzipped_secret(&stored("deployed")), plain] {
        let release = decode(&secret).unwrap();
        assert_eq!(
            (
                release.name.as_str(),
                release.namespace.as_str(),
                release.revision
            ),
            ("shop", "acme", 7)
        );
        assert_eq!(release.status, Status::Deployed);
        assert_eq!(
            (release.chart_name.as_str(), release.chart_version.as_str()),
            ("shop", "1.2.3")
        );
        assert!(release.server_side);
        assert_eq!(release.description, "Initial install underway");
    }
}

#[test]
fn manifest_workloads_are_read_and_other_documents_skipped() {
    let release = decode(&gzipped_secret(&stored("deployed"))).unwrap();
    assert_eq!(
        release.workloads,
        [
            workload(WorkloadKind::Deployment, "acme", "web"),
            workload(WorkloadKind::DaemonSet, "elsewhere", "logs"),
            workload(WorkloadKind::StatefulSet, "acme", "db"),
        ]
    );
}

#[test]
fn missing_apply_method_means_client_side_apply() {
    let json = stored("deployed").replace(r#","apply_method":"ssa""#, "");
    assert!(!decode(&gzipped_secret(&json)).unwrap().server_side);
}

#[test]
fn unlocking_changes_status_and_description_and_nothing_else() {
    let locked = gzipped_secret(&stored("pending-install"));
    let unlocked = unlocked(&locked, "left by a \"dead\" helm").unwrap();

    let mut expected = locked;
    expected.data = unlocked.data.clone();
    expected
        .metadata
        .labels
        .as_mut()
        .unwrap()
        .insert("status".to_owned(), "failed".to_owned());
    assert_eq!(unlocked, expected);
    assert_eq!(unlocked.metadata.resource_version.as_deref(), Some("41"));

    let release = decode(&unlocked).unwrap();
    assert_eq!(release.status, Status::Failed);
    assert_eq!(release.description, "left by a \"dead\" helm");

    let mut text = String::new();
    payload(&unlocked)
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    for kept in [
        r#""values":{"big":123456789012345678901234567890,"small":0.10}"#,
        r#""of_a_newer_helm":[1e400]"#,
        r#""first_deployed":"2026-11-01T10:00:00.123456789Z""#,
        r#""notes":"hello\n""#,
    ] {
        assert!(text.contains(kept), "{kept} is missing in {text}");
    }
}

#[test]
fn without_a_resource_version_nothing_is_unlocked() {
    let mut locked = gzipped_secret(&stored("pending-install"));
    locked.metadata.resource_version = None;
    assert!(matches!(
        unlocked(&locked, ""),
        Err(ReleaseError::Unversioned { .. })
    ));
}

#[test]
fn unreadable_release_error_names_secret() {
    let complete = pack(stored("deployed").as_bytes()).unwrap();
    let mut bomb = GzEncoder::new(Vec::new(), Compression::fast());
    io::copy(&mut io::repeat(b' ').take(PAYLOAD_LIMIT + 1), &mut bomb).unwrap();
    let bomb = STANDARD.encode(bomb.finish().unwrap()).into_bytes();
    let cases = [
        (
            "truncated",
            complete[..complete.len() / 2].to_vec(),
            "incomplete deflate stream",
        ),
        ("not base64", b"%%%%".to_vec(), "Invalid"),
        (
            "not JSON",
            STANDARD.encode("rubbish").into_bytes(),
            "expected value",
        ),
        ("empty", Vec::new(), "EOF"),
        ("too large", bomb, "more than 64 MiB"),
    ];
    for (case, data, cause) in cases {
        let error = decode(&secret(data.clone())).expect_err(case);
        assert!(
            error
                .to_string()
                .contains("acme/sh.helm.release.v1.shop.v7"),
            "{case}: {error}"
        );
        let source = std::error::Error::source(&error).expect(case).to_string();
        assert!(source.contains(cause), "{case}: {source}");
        assert!(unlocked(&secret(data), "").is_err(), "{case}");
    }
    let empty = Secret {
        data: None,
        ..secret(Vec::new())
    };
    assert!(matches!(decode(&empty), Err(ReleaseError::Missing { .. })));
}

#[test]
fn payload_of_different_release_is_rejected() {
    let error = decode(&gzipped_secret(
        &stored("deployed").replace(r#""version":7"#, r#""version":8"#),
    ));
    assert!(
        matches!(error, Err(ReleaseError::Mismatch { revision: 8, .. })),
        "{error:?}"
    );
}

#[test]
fn release_statuses_round_trip_and_default_to_unknown() {
    for status in Status::ALL {
        assert_eq!(status.to_string().parse::<Status>().unwrap(), status);
    }
    assert_eq!("of-tomorrow".parse::<Status>().unwrap(), Status::Unknown);
    let pending: Vec<&str> = Status::ALL
        .iter()
        .filter(|status| status.is_pending())
        .map(|status| status.as_str())
        .collect();
    assert_eq!(
        pending,
        ["pending-install", "pending-upgrade", "pending-rollback"]
    );
}

#[test]
fn debug_output_does_not_show_values() {
    let json = stored("deployed").replace("replicaCount", "password");
    assert!(!format!("{:?}", decode(&gzipped_secret(&json)).unwrap()).contains("password"));
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(
        data in prop::collection::vec(any::<u8>(), 0..512),
        zip in any::<bool>(),
        encode in any::<bool>(),
    ) {
        let data = match (zip, encode) {
            (true, _) => pack(&data).unwrap(),
            (false, true) => STANDARD.encode(&data).into_bytes(),
            (false, false) => data,
        };
        prop_assert!(decode(&secret(data)).is_err());
    }

    #[test]
    fn arbitrary_manifests_never_panic(
        manifest in r"([-:{}\[\]&*!|>\n a-z0-9]{0,12}(---|Deployment|kind: |apps/v1|metadata:|\n|\{)){0,12}"
    ) {
        let workloads = workloads(&manifest, "acme");
        prop_assert!(workloads.iter().all(|workload| !workload.name.is_empty()));
    }
}
