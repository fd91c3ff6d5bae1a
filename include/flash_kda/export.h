/* What libflash_kda exports; everything else in it is hidden. */
#ifndef FLASH_KDA_EXPORT_H_
#define FLASH_KDA_EXPORT_H_

#if defined(__GNUC__)
#define FLASH_KDA_API __attribute__((visibility("default")))
#else
#define FLASH_KDA_API
#endif

#endif /* FLASH_KDA_EXPORT_H_ */
