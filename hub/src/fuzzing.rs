//! Promises about every input. The fuzzer checks them on the inputs that it finds, and a test on the seeds.

use std::path::Path;

use krypton_types::error_chain::chain;
use rcgen::PublicKeyData as _;
use serde_json::json;

use crate::ca::csr::{REQUEST_MAX_BYTES, RequestError, public_key};
use crate::discovery::cluster_profile::credential;
use crate::discovery::cluster_profile::provider_file::{
    self, ApiVersion, ArgsPolicy, EnvsPolicy, ProviderFile,
};

#[path = "../../fuzz/shared.rs"]
mod shared;
use shared::{Target, message_defect, promise};

/// By the names of the folders of seeds.
pub const TARGETS: &[(&str, Target)] = &[
    ("csr", csr),
    ("exec_credential", exec_credential),
    ("provider_file", provider_file),
];

/// A certificate request of an agent.
pub fn csr(bytes: &[u8]) -> Option<String> {
    let key = match public_key(bytes) {
        Ok(key) => key.subject_public_key_info(),
        Err(error) => return message_defect(&error.to_string()),
    };
    promise!(bytes.len() <= REQUEST_MAX_BYTES, "{} bytes", bytes.len());
    let contains_key = bytes.windows(key.len()).any(|window| window == key);
    promise!(contains_key, "its key is not in it");
    // The signature is at the end.
    let mut forged = bytes.to_vec();
    *forged.last_mut()? ^= 1;
    let forged = public_key(&forged).map(|_| ());
    promise!(forged.is_err(), "it is accepted with another signature");
    let longer = public_key(&[bytes, &[0]].concat()).map(|_| ());
    let refused = [RequestError::NotARequest, RequestError::TooLarge].map(Err);
    promise!(refused.contains(&longer), "with more after it: {longer:?}");
    None
}

/// The answer of an access provider's program.
pub fn exec_credential(bytes: &[u8]) -> Option<String> {
    let versions = [ApiVersion::V1, ApiVersion::V1beta1];
    let parsed = versions.map(|version| credential::read(bytes, version));
    promise!(!parsed.iter().all(Result::is_ok), "both versions accept it");
    parsed
        .into_iter()
        .zip(versions)
        .find_map(|(parsed, version)| {
            let parsed = match parsed {
                Ok(parsed) => parsed,
                Err(error) => return message_defect(&error),
            };
            let token = parsed.token.as_deref();
            let legal = |token: &str| token.bytes().all(|byte| byte.is_ascii_graphic());
            promise!(token.is_none_or(legal), "the token {token:?}");
            let pair = parsed.certificate.as_ref();
            let is_complete =
                pair.is_none_or(|(certificate, key)| !certificate.is_empty() && !key.is_empty());
            promise!(token.is_some() || pair.is_some(), "it is nothing");
            promise!(is_complete && token != Some(""), "a part of it is empty");
            let debug = format!("{parsed:?}");
            let secrets = [token, pair.map(|(_, key)| key.as_str())];
            let mut secrets = secrets
                .into_iter()
                .flatten()
                .filter(|secret| secret.len() > 40);
            promise!(!secrets.any(|secret| debug.contains(secret)), "{debug}");
            let status = json!({
                "token": token,
                "clientCertificateData": pair.map(|(certificate, _)| certificate),
                "clientKeyData": pair.map(|(_, key)| key),
                "expirationTimestamp": parsed.expires.map(|at| at.to_string()),
            });
            let kind = "ExecCredential";
            let document = json!({"kind": kind, "apiVersion": version.as_str(), "status": status});
            let reparsed = credential::read(document.to_string().as_bytes(), version);
            promise!(
                reparsed.as_ref() == Ok(&parsed),
                "{parsed:?} is {reparsed:?}"
            );
            None
        })
}

/// The file of access providers.
pub fn provider_file(bytes: &[u8]) -> Option<String> {
    let path = Path::new("/etc/krypton/providers.json");
    let parsed = match provider_file::parse(path, bytes) {
        Ok(parsed) => parsed,
        Err(error) => return message_defect(&chain(&error)),
    };
    for (number, provider) in parsed.providers.iter().enumerate() {
        let exec = &provider.exec;
        let is_valid = exec.command.starts_with('/') || !exec.command.contains('/');
        promise!(is_valid && !exec.command.is_empty(), "{:?}", exec.command);
        let others = parsed.providers.iter().skip(number + 1);
        let unique = others.into_iter().all(|other| other.name != provider.name);
        promise!(unique && !provider.name.is_empty(), "{:?}", provider.name);
        let names = exec.env.iter().map(|(name, _)| name);
        let mut all = names.clone().chain(exec.env.iter().map(|(_, value)| value));
        let all = all.by_ref().chain(&exec.args).chain([&exec.command]);
        promise!(!all.into_iter().any(|text| text.contains('\0')), "a NUL");
        let legal = |name: &String| !name.is_empty() && !name.contains('=');
        promise!(names.clone().all(legal), "{exec:?}");
    }
    let reparsed = provider_file::parse(path, &to_json(&parsed));
    promise!(
        reparsed.as_ref().is_ok_and(|reparsed| *reparsed == parsed),
        "{parsed:?} is {reparsed:?}"
    );
    None
}

fn to_json(file: &ProviderFile) -> Vec<u8> {
    let provider = |provider: &provider_file::AccessProvider| {
        let exec = &provider.exec;
        let env = exec.env.iter();
        let env = env.map(|(name, value)| json!({"name": name, "value": value}));
        json!({
            "name": provider.name,
            "execConfig": {
                "apiVersion": exec.api_version.as_str(),
                "command": exec.command,
                "args": exec.args,
                "env": env.collect::<Vec<_>>(),
                "provideClusterInfo": exec.provide_cluster_info,
            },
            "profileSourcedCLIArgsPolicy": match provider.args {
                ArgsPolicy::Append => "Append",
                ArgsPolicy::Ignore => "Ignore",
            },
            "profileSourcedEnvVarsPolicy": match provider.envs {
                EnvsPolicy::AppendIfNotExists => "AppendIfNotExists",
                EnvsPolicy::Replace => "Replace",
                EnvsPolicy::Ignore => "Ignore",
            },
        })
    };
    let providers: Vec<_> = file.providers.iter().map(provider).collect();
    json!({ "providers": providers }).to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    /// `WRITE_CORPUS=1` writes the seeds that are not text.
    #[test]
    fn each_seed_keeps_its_promises() {
        let request = |kind| {
            let key = KeyPair::generate_for(kind).unwrap();
            let params = CertificateParams::new(["example.com".to_owned()]).unwrap();
            params.serialize_request(&key).unwrap().der().to_vec()
        };
        let p256 = request(&rcgen::PKCS_ECDSA_P256_SHA256);
        let mut forged = p256.clone();
        *forged.last_mut().unwrap() ^= 1;
        shared::write(
            "csr",
            &[
                ("good-p384", request(&rcgen::PKCS_ECDSA_P384_SHA384)),
                ("good-ed25519", request(&rcgen::PKCS_ED25519)),
                ("refused-rsa", request(&rcgen::PKCS_RSA_SHA256)),
                ("refused-signature", forged),
                ("refused-cut", p256.split_at(100).0.to_vec()),
                ("refused-more", [&p256[..], b"x"].concat()),
                ("good-p256", p256),
            ],
        );
        shared::replay(TARGETS);
    }
}
