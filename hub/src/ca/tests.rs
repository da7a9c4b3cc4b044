//! Tests that TLS accepts the certificates of the CA, and that a request contributes nothing but its key.

use krypton_runtime::tls;
use krypton_types::validity::AGENT_CERTIFICATE_LIFE;
use rustls::pki_types::{PrivateKeyDer, ServerName};
use x509_parser::extensions::GeneralName;

use super::csr::tests::request;
use super::phase::with_changes;
use super::*;

const UID: &str = "6f1f2f3c-0000-4000-8000-0123456789ab";
const DAY: i64 = 24 * 60 * 60;

fn now() -> Timestamp {
    Timestamp::from_second(1_800_000_000).unwrap()
}

fn new_data() -> SecretData {
    generate_data("a.krypton", now()).unwrap()
}

fn authority() -> Authority {
    Authority::generate("a.krypton", now()).unwrap()
}

fn sign(authority: &Authority, key: &KeyPair) -> CertificateDer<'static> {
    authority
        .sign_agent(&request(key), "edge-1", UID, now(), AGENT_CERTIFICATE_LIFE)
        .unwrap()
        .remove(0)
}

#[test]
fn agent_certificate_identifies_cluster_and_uid() {
    let authority = authority();
    let key = KeyPair::generate().unwrap();
    let (first, second) = (sign(&authority, &key), sign(&authority, &key));
    let certificate = read_agent_certificate("a.krypton", &first).unwrap();
    assert_eq!(
        (certificate.cluster.as_str(), certificate.uid.as_str()),
        ("edge-1", UID)
    );
    assert_eq!(certificate.not_before.as_second(), now().as_second() - DAY);
    assert_eq!(
        certificate.not_after.as_second(),
        now().as_second() + 7 * DAY
    );
    assert_eq!(certificate.serial.len(), 32);
    let other = read_agent_certificate("a.krypton", &second).unwrap();
    assert_ne!(certificate.serial, other.serial);
}

#[test]
fn certificate_takes_only_key_from_request() {
    let authority = authority();
    let key = KeyPair::generate().unwrap();
    let mut requested = CertificateParams::new(vec!["hub.example.org".to_owned()]).unwrap();
    requested.subject_alt_names.push(SanType::URI(
        "spiffe://a.krypton/hub".to_owned().try_into().unwrap(),
    ));
    requested
        .distinguished_name
        .push(DnType::CommonName, "edge-2");
    requested.distinguished_name.push(
        DnType::from_oid(SUBJECT_SERIAL_NUMBER),
        DnValue::PrintableString("another".try_into().unwrap()),
    );
    requested.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    requested.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    requested.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::Any,
    ];
    let request = requested.serialize_request(&key).unwrap();
    let signed = authority
        .sign_agent(request.der(), "edge-1", UID, now(), AGENT_CERTIFICATE_LIFE)
        .unwrap()
        .remove(0);

    let agent = read_agent_certificate("a.krypton", &signed).unwrap();
    assert_eq!(
        (agent.cluster.as_str(), agent.uid.as_str()),
        ("edge-1", UID)
    );
    let (_, certificate) = X509Certificate::from_der(&signed).unwrap();
    assert!(!certificate.is_ca());
    let names = certificate.subject_alternative_name().unwrap().unwrap();
    assert_eq!(
        names.value.general_names,
        [GeneralName::URI("spiffe://a.krypton/cluster/edge-1")]
    );
    let usage = certificate.extended_key_usage().unwrap().unwrap().value;
    assert!(usage.client_auth && !usage.server_auth && !usage.any);
    let names: Vec<_> = certificate.subject().iter_common_name().collect();
    assert_eq!(names.len(), 1);
    assert_eq!(names[0].as_str().unwrap(), "edge-1");
    assert_eq!(certificate.public_key().raw, key.subject_public_key_info());
}

#[test]
fn invalid_name_or_uid_is_not_signed() {
    let authority = authority();
    let request = request(&KeyPair::generate().unwrap());
    for (name, uid) in [
        ("", UID),
        ("edge-1/x", UID),
        ("Edge", UID),
        ("edge\n1", UID),
        ("edge-1", ""),
        ("edge-1", "a_b*"),
        ("edge-1", "ü"),
        ("edge-1", &"a".repeat(65)),
    ] {
        let signed = authority.sign_agent(&request, name, uid, now(), AGENT_CERTIFICATE_LIFE);
        assert!(
            matches!(signed, Err(AuthorityError::Subject { .. })),
            "{name:?} {uid:?}"
        );
    }
}

#[test]
fn lookalike_agent_certificate_is_rejected() {
    let authority = authority();
    let key = KeyPair::generate().unwrap();
    let valid = sign(&authority, &key);
    let error = |der: &[u8], trust_domain: &str| {
        read_agent_certificate(trust_domain, der)
            .unwrap_err()
            .to_string()
    };
    assert!(error(&valid, "b.krypton").contains("trust domain"));
    assert!(error(&valid, "a.krypto").contains("trust domain"));
    assert!(error(b"x", "a.krypton").contains("not an X.509"));
    let hub = authority.hub_credential(now()).unwrap().certificates;
    assert!(error(&hub[0], "a.krypton").contains("names the hub"));
    assert!(error(&authority.roots()[0], "a.krypton").contains("0 URI names"));

    let error_with = |change: &dyn Fn(&mut CertificateParams)| {
        let id = SpiffeId::cluster("a.krypton", "edge-1");
        let mut params = authority
            .common_params(&id, now(), AGENT_CERTIFICATE_LIFE)
            .unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let signed = params.signed_by(&key, &authority.issuer).unwrap();
        error(signed.der(), "a.krypton")
    };
    assert!(error_with(&|_| ()).contains("does not name its EdgeCluster"));
    assert!(error_with(&|p| p.extended_key_usages.clear()).contains("not for clients"));
    assert!(
        error_with(&|p| p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth])
            .contains("not for clients")
    );
    let uri = |text: &str| SanType::URI(text.to_owned().try_into().unwrap());
    assert!(
        error_with(&|p| p
            .subject_alt_names
            .push(uri("spiffe://a.krypton/cluster/edge-2")))
        .contains("2 URI names")
    );
    assert!(
        error_with(&|p| p.subject_alt_names = vec![uri("spiffe://a.krypton/cluster/edge-1:x")])
            .contains("not one of a hub")
    );
}

#[test]
fn hub_and_agent_authenticate_each_other() {
    let authority = Authority::generate("a.krypton", clock::wall()).unwrap();
    let roots = authority.roots();
    let key = KeyPair::generate().unwrap();
    let certificates = authority
        .sign_agent(
            &request(&key),
            "edge-1",
            UID,
            clock::wall(),
            AGENT_CERTIFICATE_LIFE,
        )
        .unwrap();
    let agent = Credential {
        certificates: certificates.clone(),
        key: PrivateKeyDer::Pkcs8(key.serialize_der().into()),
    };
    let hub = authority.hub_credential(clock::wall()).unwrap();
    let server = tls::server_config(&roots, hub).unwrap();
    let client = tls::client_config(&roots, Some(agent)).unwrap();
    let name = ServerName::try_from("whatever.example.org").unwrap();
    let mut client = rustls::ClientConnection::new(client.into(), name).unwrap();
    let mut server = rustls::ServerConnection::new(server.into()).unwrap();
    for _ in 0..4 {
        let mut wire = Vec::new();
        client.write_tls(&mut wire).unwrap();
        server.read_tls(&mut wire.as_slice()).unwrap();
        server.process_new_packets().unwrap();
        let mut wire = Vec::new();
        server.write_tls(&mut wire).unwrap();
        client.read_tls(&mut wire.as_slice()).unwrap();
        client.process_new_packets().unwrap();
    }
    assert!(!client.is_handshaking() && !server.is_handshaking());
    assert_eq!(server.peer_certificates().unwrap(), certificates);
}

#[test]
fn nothing_outlives_the_authority() {
    let authority = authority();
    let late = after(now(), AUTHORITY_LIFE - Duration::from_secs(60));
    let request = request(&KeyPair::generate().unwrap());
    let signed = authority
        .sign_agent(&request, "edge-1", UID, late, AGENT_CERTIFICATE_LIFE)
        .unwrap();
    let certificate = read_agent_certificate("a.krypton", &signed[0]).unwrap();
    assert_eq!(certificate.not_after, authority.not_after);
}

#[test]
fn stored_authority_signs_after_reload() {
    let data = new_data();
    let loaded = Authority::from_data(&data, now()).unwrap();
    assert_eq!(Some(&*loaded.ca_pem()), text(&data, CERTIFICATE_KEY));
    assert_eq!(loaded.trust_domain(), "a.krypton");
    let signed = sign(&loaded, &KeyPair::generate().unwrap());
    read_agent_certificate("a.krypton", &signed).unwrap();
}

#[test]
fn second_root_is_trusted_and_first_signs() {
    let [first, second] = [new_data(), new_data()];
    let both = [&first, &second].map(|data| text(data, CERTIFICATE_KEY).unwrap());
    let load = |signing: &SecretData| {
        let data = with_changes(signing, [(CERTIFICATE_KEY, Some(both.concat()))]);
        Authority::from_data(&data, now())
    };
    assert_eq!(load(&first).unwrap().roots().len(), 2);
    assert!(load(&second).unwrap_err().contains("ca.key"));
}

#[test]
fn unreadable_authority_part_is_named() {
    let valid = new_data();
    let problem = |key, value: Option<&str>| {
        let data = with_changes(&valid, [(key, value.map(str::to_owned))]);
        Authority::from_data(&data, now()).unwrap_err()
    };
    for key in [CERTIFICATE_KEY, PRIVATE_KEY_KEY, TRUST_DOMAIN_KEY] {
        for value in [None, Some("a b"), Some("")] {
            let message = problem(key, value);
            assert!(message.contains(key), "{message}");
        }
    }
    let other = new_data();
    let other = text(&other, PRIVATE_KEY_KEY);
    assert!(problem(PRIVATE_KEY_KEY, other).contains("ca.key does not match"));
    let authority = Authority::from_data(&valid, now()).unwrap();
    let leaf = authority.hub_credential(now()).unwrap();
    let leaf = pem(&leaf.certificates);
    assert!(problem(CERTIFICATE_KEY, Some(&leaf)).contains("not a CA"));
    let late = after(now(), AUTHORITY_LIFE);
    let expired = Authority::from_data(&valid, late).unwrap_err();
    assert!(expired.contains("expired"));
    assert!(matches!(
        Authority::generate("A B", now()),
        Err(AuthorityError::TrustDomain(_))
    ));
}

#[test]
fn no_key_is_shown() {
    let authority = authority();
    let text = format!("{authority:?}");
    assert!(
        !text.contains("PRIVATE") && text.contains("[elided]"),
        "{text}"
    );
}

#[test]
fn private_key_is_not_published_with_ca() {
    let data = new_data();
    let [certificate, key] =
        [CERTIFICATE_KEY, PRIVATE_KEY_KEY].map(|key| text(&data, key).unwrap());
    let mixed = with_changes(
        &data,
        [(CERTIFICATE_KEY, Some(format!("{certificate}{key}")))],
    );
    let authority = Authority::from_data(&mixed, now()).unwrap();
    assert_eq!(authority.ca_pem(), certificate);
}

#[test]
fn issuing_root_is_distinguished_from_namesake() {
    let (issuing, other) = (authority(), authority());
    let certificate = sign(&issuing, &KeyPair::generate().unwrap());
    assert_eq!(issuing.issuer_of(&certificate), issuing.signing_root());
    assert_eq!(other.issuer_of(&certificate), None);
    assert_eq!(issuing.issuer_of(b"x"), None);
    let steady = new_data();
    let rotated = switch(&announce(&steady, now()).unwrap()).unwrap();
    let (before, after) = (
        Authority::from_data(&steady, now()).unwrap(),
        Authority::from_data(&rotated, now()).unwrap(),
    );
    let certificate = sign(&before, &KeyPair::generate().unwrap());
    assert_eq!(after.issuer_of(&certificate), before.signing_root());
    assert_ne!(after.signing_root(), before.signing_root());
}
