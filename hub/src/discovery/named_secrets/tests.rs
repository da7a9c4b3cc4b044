use k8s_openapi::ByteString;

use super::*;

fn provider(named: Named) -> NamedSecrets {
    let nowhere = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
    NamedSecrets {
        client: Client::try_from(nowhere).unwrap(),
        named: watch::channel(named).1,
        findings: watch::channel(Arc::default()).0,
        label: "there".to_owned(),
        key: "kubeconfig".to_owned(),
        policy: Policy::default(),
    }
}

fn name() -> SecretName {
    SecretName {
        namespace: "team".to_owned(),
        name: "admin".to_owned(),
    }
}

fn secret(labels: &[&str]) -> Secret {
    let mut secret = Secret::default();
    secret.metadata.name = Some("admin".to_owned());
    secret.metadata.namespace = Some("team".to_owned());
    let labels = labels
        .iter()
        .map(|it| ((*it).to_owned(), "true".to_owned()));
    secret.metadata.labels = Some(labels.collect());
    secret.data = Some([("other".to_owned(), ByteString(Vec::new()))].into());
    secret
}

fn slot(secret: Option<Option<Secret>>, trouble: Option<&str>) -> Slot {
    Slot {
        secret,
        trouble: trouble.map(str::to_owned),
        reading: None,
    }
}

#[tokio::test]
async fn named_secret_becomes_member_if_trusted_or_open() {
    let provider = provider(None);
    for (labels, trusted, is_member, is_open) in [
        (&[][..], true, true, false),
        (&[][..], false, false, false),
        (&["there"][..], false, true, true),
        (&[names::OPEN_TO_DEPLOYMENTS_LABEL][..], false, true, true),
        (&["else"][..], false, false, false),
    ] {
        let naming = Naming { key: None, trusted };
        let read = slot(Some(Some(secret(labels))), None);
        let (finding, source) = provider.read(&name(), &naming, &read);
        let expected = Finding::There {
            member: "admin".to_owned(),
            open: is_open,
        };
        assert_eq!(finding, Some(expected), "{labels:?}");
        assert_eq!(source.is_some(), is_member, "{labels:?} {trusted}");
    }
}

#[tokio::test]
async fn unread_secret_is_unknown_and_last_read_stands() {
    let provider = provider(None);
    let naming = Naming {
        key: Some("admin.conf".to_owned()),
        trusted: true,
    };
    let read = |slot: &Slot| provider.read(&name(), &naming, slot);
    let (finding, source) = read(&Slot::default());
    assert_eq!(finding, None);
    assert_eq!(source.unwrap().access.unwrap_err().reason, reason::STARTING);
    let (finding, source) = read(&slot(None, Some("no answer")));
    assert_eq!(finding, Some(Finding::Unread("no answer".to_owned())));
    assert_eq!(source.unwrap().access.unwrap_err().reason, reason::STARTING);
    let (finding, source) = read(&slot(Some(None), None));
    assert_eq!((finding, source), (Some(Finding::NotThere), None));
    let mut going = secret(&[]);
    let now = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH);
    going.metadata.deletion_timestamp = Some(now);
    let (finding, _) = read(&slot(Some(Some(going)), None));
    assert_eq!(finding, Some(Finding::NotThere));

    let later = slot(Some(Some(secret(&[]))), Some("no answer"));
    let source = read(&later).1.unwrap();
    assert_eq!(source.stale.unwrap().reason, reason::SOURCE_UNAVAILABLE);
    let fault = source.access.unwrap_err().message;
    assert!(
        fault.contains("team/admin") && fault.contains("\"admin.conf\""),
        "{fault}"
    );
}

#[tokio::test]
async fn every_secret_is_covered_until_names_are_known() {
    let other = SecretName {
        namespace: "team".to_owned(),
        name: "other".to_owned(),
    };
    assert!(provider(None).covers(&name().origin()));
    let named = Some(Arc::new([(name(), Naming::default())].into()));
    let provider = provider(named);
    assert!(provider.covers(&name().origin()));
    assert!(!provider.covers(&other.origin()));
}

#[tokio::test]
async fn secret_is_read_again_only_after_its_change() {
    let provider = provider(None);
    let naming = Naming {
        key: None,
        trusted: true,
    };
    let other = SecretName {
        name: "other".to_owned(),
        ..name()
    };
    let mut named: BTreeMap<_, _> = [name(), other.clone()]
        .map(|name| (name, naming.clone()))
        .into();
    let mut slots = BTreeMap::new();
    assert_eq!(provider.read_changed(&named, &mut slots), 2);
    assert_eq!(provider.read_changed(&named, &mut slots), 0);
    slots.get_mut(&name()).unwrap().take(Ok(Some(secret(&[]))));
    assert_eq!(provider.read_changed(&named, &mut slots), 1);
    let reading = slots[&name()].reading.as_ref().unwrap();
    assert!(matches!(reading.finding, Some(Finding::There { .. })));
    slots
        .get_mut(&name())
        .unwrap()
        .take(Err("no answer".to_owned()));
    assert_eq!(provider.read_changed(&named, &mut slots), 1);
    named.get_mut(&other).unwrap().trusted = false;
    assert_eq!(provider.read_changed(&named, &mut slots), 1);
    named.remove(&other);
    assert_eq!(provider.read_changed(&named, &mut slots), 0);
    assert!(!slots.contains_key(&other));
}
